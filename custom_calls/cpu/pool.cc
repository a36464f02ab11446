#include "cpu/pool.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "cpu/float_mode.h"

namespace einsummable::cpu {
namespace {

// Calls that take longer than this to end are worth waking a thread for.
constexpr int64_t kWorthWakingNs = 100'000;
// Calls queued for longer than this are stuck behind one that blocks.
constexpr int64_t kStuckNs = 30'000'000;
constexpr int64_t kMaxRescuers = 512;

// Whether this is a thread of the pool. The calls that end because another one has are left to the loop that ended it,
// which bounds the stack however long a chain of exchanges gets.
thread_local bool is_worker = false;

// Follows shorter times quickly and longer ones slowly: most of those are only this thread losing its core.
void Smooth(std::atomic<int64_t>& typical, int64_t sample) {
  const int64_t old = typical.load(std::memory_order_relaxed);
  typical.store(old + (sample - old) / (sample < old ? 2 : 16), std::memory_order_relaxed);
}

}  // namespace

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Pool::Pool() : num_threads_(std::max<int64_t>(1, std::thread::hardware_concurrency())) {
  // Detached: the pool lives as long as the process, and exit waits for nobody.
  for (int64_t i = 0; i < num_threads_; ++i) std::thread(&Pool::Worker, this).detach();
}

void Pool::Wake(int64_t threads) {
  for (; threads > 0; --threads) {
    std::lock_guard lock(mutex_);
    if (sleepers_.empty()) return;
    sleepers_.back()->is_woken = true;
    sleepers_.back()->wake.notify_one();
    sleepers_.pop_back();
  }
}

void Pool::Share(const std::shared_ptr<Work>& work, int64_t helpers) {
  {
    std::lock_guard lock(mutex_);
    work_.push_back(work);
  }
  Wake(std::min(helpers, num_threads_ - 1));
  work->Run();
  Forget(work);
}

void Pool::Forget(const std::shared_ptr<Work>& work) {
  std::lock_guard lock(mutex_);
  const auto entry = std::find(work_.begin(), work_.end(), work);
  if (entry != work_.end()) work_.erase(entry);
}

// Ends calls until there are none; when that takes long, the other threads are woken to help.
void Pool::End(Endings& endings) {
  const FloatMode mode(Denormals::kFlush);
  int64_t begin = NowNs();
  int64_t now = begin;
  while (endings.EndNext()) {
    const int64_t before = std::exchange(now, NowNs());
    Smooth(endings.typical_ns(), now - before);
    if (now - begin < kWorthWakingNs) continue;
    begin = now;
    Wake(num_pending() - 1);
  }
}

void Pool::Complete(const std::shared_ptr<Endings>& endings) {
  const int64_t count = endings->num_left();
  const int64_t now = NowNs();
  {
    std::lock_guard lock(mutex_);
    pending_.push_back({endings, now});
  }
  const bool is_long = endings->typical_ns().load(std::memory_order_relaxed) * count > kWorthWakingNs;
  const int64_t wanted = is_long ? count : 1;
  Wake(is_worker ? wanted - 1 : wanted);  // a worker takes what there is next itself
}

// Forgets calls of which all have been ended, or are about to be.
void Pool::DropEnded() {
  while (!pending_.empty() && pending_.front().endings->num_left() == 0) pending_.pop_front();
}

int64_t Pool::CountPending() {
  int64_t count = 0;
  for (const Pending& pending : pending_) count += pending.endings->num_left();
  return count;
}

int64_t Pool::num_pending() {
  std::lock_guard lock(mutex_);
  return CountPending();
}

// Waits for something to do.
Pool::Job Pool::Next() {
  Sleeper sleeper;
  std::unique_lock lock(mutex_);
  while (true) {
    DropEnded();
    if (!work_.empty()) return {work_.front(), nullptr};
    if (!pending_.empty()) return {nullptr, pending_.front().endings};
    sleepers_.push_back(&sleeper);
    sleeper.wake.wait(lock, [&] { return sleeper.is_woken; });
    sleeper.is_woken = false;
  }
}

void Pool::Worker() {
  is_worker = true;
  while (true) {
    const Job job = Next();
    if (job.work) {
      job.work->Run();
      Forget(job.work);
    } else {
      End(*job.endings);
    }
  }
}

void Pool::Rescue() {
  int64_t added = 0;
  {
    std::lock_guard lock(mutex_);
    DropEnded();
    if (pending_.empty() || NowNs() - pending_.front().queued_ns < kStuckNs) return;
    added = std::min<int64_t>(CountPending(), kMaxRescuers - num_rescuers_);
    num_rescuers_ += added;
  }
  for (int64_t i = 0; i < added; ++i) std::thread(&Pool::Worker, this).detach();
}

}  // namespace einsummable::cpu
