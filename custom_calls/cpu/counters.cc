#include "cpu/counters.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace einsummable::cpu {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Counter>> counters;
};

// Never destroyed: threads of the engine may count while the process exits.
Registry& Global() {
  static Registry* registry = new Registry;
  return *registry;
}

}  // namespace

std::vector<Counter*> CountersOf(int64_t exchange_id, int64_t num_ranks) {
  Registry& registry = Global();
  std::lock_guard lock(registry.mutex);
  std::vector<Counter*> found;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    auto& counter = registry.counters[{exchange_id, rank}];
    if (!counter) counter = std::make_unique<Counter>(exchange_id, rank);
    found.push_back(counter.get());
  }
  return found;
}

std::vector<CounterValue> ReadCounters() {
  Registry& registry = Global();
  std::lock_guard lock(registry.mutex);
  std::vector<CounterValue> values;
  for (const auto& [key, counter] : registry.counters) {
    if (counter->calls.load() == 0) continue;
    values.push_back({key.first, key.second, counter->calls.load(), counter->bytes_received.load()});
  }
  return values;
}

void ResetCounters() {
  Registry& registry = Global();
  std::lock_guard lock(registry.mutex);
  for (auto& [key, counter] : registry.counters) {
    counter->calls.store(0);
    counter->bytes_received.store(0);
  }
}

}  // namespace einsummable::cpu
