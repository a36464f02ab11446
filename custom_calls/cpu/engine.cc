#include "cpu/engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace einsummable::cpu {
namespace {

constexpr double kDefaultTimeoutS = 60;
constexpr auto kWatchInterval = std::chrono::milliseconds(50);
constexpr size_t kMaxFailedRuns = 1024;
// A rank that comes within this part of the timeout after it was given up has lacked a thread; and where no call comes
// for as long, none is queued.
constexpr double kSoon = 0.1;
constexpr size_t kMaxSpare = 64;

std::atomic<Engine*> global{nullptr};
std::mutex global_mutex;

double TimeoutFromEnvironment() {
  const char* text = std::getenv("EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S");
  const double value = text == nullptr ? 0 : std::atof(text);
  return value > 0 ? value : kDefaultTimeoutS;
}

bool SameProgram(const Exchange& a, const Exchange& b) {
  return &a == &b || a.program->encoding == b.program->encoding;
}

// In a forked child the parent's threads do not exist and its locks may be held for ever.
void ForgetInChild() {
  global.store(nullptr);
  new (&global_mutex) std::mutex;
}

}  // namespace

Engine& Engine::Get() {
  if (Engine* engine = global.load(std::memory_order_acquire)) return *engine;
  std::lock_guard lock(global_mutex);
  if (global.load() == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, ForgetInChild);
    static_cast<void>(registered);
    global.store(new Engine, std::memory_order_release);
  }
  return *global.load();
}

Engine::Engine() : timeout_s_(TimeoutFromEnvironment()) { std::thread(&Engine::Watch, this).detach(); }

void Engine::Call(const std::shared_ptr<Exchange>& exchange, const Origin& origin, int64_t rank,
                  std::unique_ptr<RankCall> call) {
  (*exchange->counters)[rank].calls.fetch_add(1, std::memory_order_relaxed);
  if (!exchange->Participates(rank)) return call->End();
  std::shared_ptr<Rendezvous> rendezvous = Find(exchange, origin, rank, call->failure);
  if (rendezvous != nullptr) return rendezvous->Arrive(rank, std::move(call));
  FailRun(origin.run_id, *call->failure);
  call->End();
}

// With `mutex_` held.
Engine::Occurrences& Engine::OccurrencesOf(const Key& key, int64_t num_ranks) {
  const auto entry = exchanges_.find(key);
  if (entry != exchanges_.end()) return entry->second;
  if (spare_.empty()) {
    exchanges_[key].next_of_rank.resize(num_ranks);
    return exchanges_[key];
  }
  auto node = std::move(spare_.back());
  spare_.pop_back();
  node.key() = key;
  node.mapped().first = 0;
  node.mapped().next_of_rank.assign(num_ranks, 0);
  return exchanges_.insert(std::move(node)).position->second;
}

// With `mutex_` held. XLA runs launches on as many threads as there are devices, and lets launches that have to queue
// wait on the same ones, where there are more than 32 on a device. Then ranks of a launch come only when others of it
// have given up; all launches that are queued would wait as long in vain, one after the other.
std::optional<Failure> Engine::FailureOf(const std::shared_ptr<Exchange>& exchange, int64_t run_id) {
  const int64_t now = NowNs(), soon_ns = static_cast<int64_t>(kSoon * timeout_s() * 1e9);
  for (const FailedRun& failed : failed_runs_) {
    if (failed.run_id != run_id) continue;
    if (failed.overdue_ns > 0 && now - failed.overdue_ns < soon_ns) backlog_ = {failed.failure.message, now, now};
    return failed.failure;
  }
  if (!backlog_) return std::nullopt;
  const bool is_over = now - backlog_->last_ns > soon_ns || now - backlog_->begin_ns > timeout_s() * 1e9;
  if (is_over) {
    backlog_.reset();
    return std::nullopt;
  }
  backlog_->last_ns = now;
  return Failure{Failure::Kind::kMissingRank,
                 exchange->Title() + ": not run, for it was queued behind a launch that failed: " + backlog_->message};
}

std::shared_ptr<Rendezvous> Engine::Find(const std::shared_ptr<Exchange>& exchange, const Origin& origin, int64_t rank,
                                         std::optional<Failure>& failure) {
  const Key key = {origin.run_id, exchange->id, origin.instance};
  std::lock_guard lock(mutex_);
  if ((failure = FailureOf(exchange, origin.run_id))) return nullptr;
  Occurrences& occurrences = OccurrencesOf(key, exchange->program->num_devices);
  if (!occurrences.open.empty() && !SameProgram(occurrences.open.front()->exchange(), *exchange)) {
    failure = {Failure::Kind::kInvalid, exchange->Title() + ": device rank " + std::to_string(rank) +
                                            " runs another program under the same exchange id than the ranks "
                                            "before it"};
    return nullptr;
  }
  const int64_t number = occurrences.next_of_rank[rank]++;
  try {
    while (number >= occurrences.first + static_cast<int64_t>(occurrences.open.size())) {
      Open(key, occurrences, exchange);
    }
  } catch (const std::bad_alloc&) {
    const int64_t bytes = exchange->schedule.view().header().scratch_bytes;
    failure = {Failure::Kind::kInvalid,
               exchange->Title() + ": no memory for " + std::to_string(bytes) + " bytes of scratch"};
    return nullptr;
  }
  return occurrences.open[number - occurrences.first];
}

std::shared_ptr<Rendezvous> Engine::Open(const Key& key, Occurrences& occurrences,
                                         const std::shared_ptr<Exchange>& exchange) {
  const int64_t number = occurrences.first + static_cast<int64_t>(occurrences.open.size());
  auto rendezvous =
      std::make_shared<Rendezvous>(exchange, arena_, pool_, [this, key, number] { Close(key, number); });
  occurrences.open.push_back(rendezvous);
  occurrences.closed.push_back(false);
  if (!watching_) {
    watching_ = true;
    watch_.notify_one();
  }
  return rendezvous;
}

void Engine::Close(const Key& key, int64_t number) {
  std::lock_guard lock(mutex_);
  const auto entry = exchanges_.find(key);
  if (entry == exchanges_.end()) return;  // the launch has failed meanwhile
  Occurrences& occurrences = entry->second;
  occurrences.closed[number - occurrences.first] = true;
  while (!occurrences.open.empty() && occurrences.closed.front()) {
    occurrences.open.pop_front();
    occurrences.closed.erase(occurrences.closed.begin());
    ++occurrences.first;
  }
  // All ranks have made equally many calls now, so counting may begin anew.
  if (!occurrences.open.empty()) return;
  auto node = exchanges_.extract(entry);
  if (spare_.size() < kMaxSpare) spare_.push_back(std::move(node));
}

void Engine::FailRun(int64_t run_id, const Failure& failure, int64_t overdue_ns) {
  std::vector<std::shared_ptr<Rendezvous>> open;
  {
    std::lock_guard lock(mutex_);
    const bool known = std::any_of(failed_runs_.begin(), failed_runs_.end(),
                                   [&](const FailedRun& failed) { return failed.run_id == run_id; });
    if (!known) failed_runs_.push_back({run_id, failure, overdue_ns});
    if (failed_runs_.size() > kMaxFailedRuns) failed_runs_.pop_front();
    auto entry = exchanges_.lower_bound(Key{run_id, INT64_MIN, INT64_MIN});
    while (entry != exchanges_.end() && std::get<0>(entry->first) == run_id) {
      open.insert(open.end(), entry->second.open.begin(), entry->second.open.end());
      entry = exchanges_.erase(entry);
    }
  }
  for (const auto& rendezvous : open) rendezvous->Fail(failure);
}

int64_t Engine::num_open() {
  std::lock_guard lock(mutex_);
  int64_t count = 0;
  for (const auto& [key, occurrences] : exchanges_) count += static_cast<int64_t>(occurrences.open.size());
  return count;
}

void Engine::FailOverdue() {
  std::vector<std::pair<int64_t, std::shared_ptr<Rendezvous>>> open;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, occurrences] : exchanges_) {
      for (const auto& rendezvous : occurrences.open) open.emplace_back(std::get<0>(key), rendezvous);
    }
  }
  const double timeout = timeout_s();
  const int64_t deadline_ns = NowNs() - static_cast<int64_t>(timeout * 1e9);
  for (const auto& [run_id, rendezvous] : open) {
    if (const auto failure = rendezvous->Overdue(deadline_ns, timeout)) FailRun(run_id, *failure, NowNs());
  }
}

// Sleeps while nothing is open, so that an idle process stays idle.
void Engine::Watch() {
  std::unique_lock lock(mutex_);
  while (true) {
    watch_.wait(lock, [&] { return watching_; });
    watch_.wait_for(lock, kWatchInterval);
    lock.unlock();
    FailOverdue();
    pool_.Rescue();
    const bool pending = pool_.num_pending() > 0;
    lock.lock();
    watching_ = pending || !exchanges_.empty();
  }
}

}  // namespace einsummable::cpu
