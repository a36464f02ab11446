#include "cpu/counters.h"

#include <map>
#include <mutex>
#include <utility>

namespace einsummable::cpu {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int64_t, int64_t>, std::weak_ptr<ExchangeCounters>> exchanges;  // by id and number of ranks
};

// Never destroyed: threads of the engine may count while the process exits.
Registry& Global() {
  static Registry* registry = new Registry;
  return *registry;
}

// What exists, to be read without the registry's lock: letting go of the last reference takes it.
std::vector<std::shared_ptr<ExchangeCounters>> Existing() {
  Registry& registry = Global();
  std::lock_guard lock(registry.mutex);
  std::vector<std::shared_ptr<ExchangeCounters>> found;
  for (const auto& [key, entry] : registry.exchanges) {
    if (auto counters = entry.lock()) found.push_back(std::move(counters));
  }
  return found;
}

}  // namespace

ExchangeCounters::~ExchangeCounters() {
  Registry& registry = Global();
  std::lock_guard lock(registry.mutex);
  const auto entry = registry.exchanges.find({exchange_id_, num_ranks()});
  // Meanwhile another instruction may have made new ones.
  if (entry != registry.exchanges.end() && entry->second.expired()) registry.exchanges.erase(entry);
}

std::shared_ptr<ExchangeCounters> CountersOf(int64_t exchange_id, int64_t num_ranks) {
  Registry& registry = Global();
  std::lock_guard lock(registry.mutex);
  std::weak_ptr<ExchangeCounters>& entry = registry.exchanges[{exchange_id, num_ranks}];
  if (auto existing = entry.lock()) return existing;
  auto made = std::make_shared<ExchangeCounters>(exchange_id, num_ranks);
  entry = made;
  return made;
}

std::vector<CounterValue> ReadCounters() {
  std::vector<CounterValue> values;
  for (const auto& counters : Existing()) {
    for (int64_t rank = 0; rank < counters->num_ranks(); ++rank) {
      const Counter& counter = (*counters)[rank];
      if (counter.calls.load() == 0) continue;
      values.push_back({counters->exchange_id(), rank, counter.calls.load(), counter.bytes_received.load()});
    }
  }
  return values;
}

void ResetCounters() {
  for (const auto& counters : Existing()) {
    for (int64_t rank = 0; rank < counters->num_ranks(); ++rank) {
      (*counters)[rank].calls.store(0);
      (*counters)[rank].bytes_received.store(0);
    }
  }
}

}  // namespace einsummable::cpu
