#include "cpu/pool.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "cpu/float_mode.h"

namespace einsummable::cpu {
namespace {

// Completions that together take longer than this are worth waking a thread for.
constexpr int64_t kWorthWakingNs = 40'000;
// Completions queued for longer than this are stuck behind one that blocks.
constexpr int64_t kStuckNs = 30'000'000;
constexpr int64_t kMaxRescuers = 512;

// Whether this thread runs completions. Those added by a completion are left to the loop that runs it, which bounds the
// stack however long a chain of exchanges gets.
thread_local bool is_worker = false;

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
  for (int64_t i = 0; i < threads; ++i) wake_.notify_one();
}

void Pool::Share(std::shared_ptr<Work> work, int64_t helpers) {
  if (helpers > 0) {
    {
      std::lock_guard lock(mutex_);
      work_.push_back(work);
      helpers = std::min({helpers, idle_, num_threads_ - 1});
    }
    Wake(helpers);
  }
  while (work->RunPart()) {
  }
  if (helpers <= 0) return;
  std::lock_guard lock(mutex_);
  Forget(work);
}

void Pool::Forget(const std::shared_ptr<Work>& work) {
  const auto entry = std::find(work_.begin(), work_.end(), work);
  if (entry != work_.end()) work_.erase(entry);
}

bool Pool::Pop(Pending& pending) {
  std::lock_guard lock(mutex_);
  if (completions_.empty()) return false;
  pending = std::move(completions_.front());
  completions_.pop_front();
  return true;
}

// Runs completions until there are none; when that takes long, the other threads are woken to help.
void Pool::Drain() {
  const FloatMode mode(Denormals::kFlush);
  int64_t begin = NowNs();
  int64_t now = begin;
  for (Pending pending; Pop(pending);) {
    pending.run();
    pending.run = nullptr;
    const int64_t before = std::exchange(now, NowNs());
    const int64_t typical = pending.typical_ns->load(std::memory_order_relaxed);
    pending.typical_ns->store(typical + (now - before - typical) / 8, std::memory_order_relaxed);
    if (now - begin < kWorthWakingNs) continue;
    begin = now;
    Wake(num_pending() - 1);
  }
}

int64_t Pool::num_pending() {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(completions_.size());
}

void Pool::Complete(std::vector<Completion> completions, std::shared_ptr<std::atomic<int64_t>> typical_ns) {
  if (completions.empty()) return;
  const int64_t count = static_cast<int64_t>(completions.size());
  const int64_t now = NowNs();
  {
    std::lock_guard lock(mutex_);
    for (Completion& completion : completions) {
      completions_.push_back({std::move(completion), typical_ns, now});
    }
  }
  const bool is_long = typical_ns->load(std::memory_order_relaxed) * count > kWorthWakingNs;
  const int64_t wanted = is_long ? count : 1;
  Wake(is_worker ? wanted - 1 : wanted);  // a worker takes what there is next itself
}

void Pool::Worker() {
  is_worker = true;
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [&] { return !completions_.empty() || !work_.empty(); });
    --idle_;
    if (!work_.empty()) {
      std::shared_ptr<Work> work = work_.front();
      lock.unlock();
      while (work->RunPart()) {
      }
      lock.lock();
      Forget(work);
      continue;
    }
    lock.unlock();
    Drain();
    lock.lock();
  }
}

void Pool::Rescue() {
  int64_t added = 0;
  {
    std::lock_guard lock(mutex_);
    if (completions_.empty() || NowNs() - completions_.front().queued_ns < kStuckNs) return;
    added = std::min<int64_t>(static_cast<int64_t>(completions_.size()), kMaxRescuers - num_rescuers_);
    num_rescuers_ += added;
  }
  for (int64_t i = 0; i < added; ++i) std::thread(&Pool::Worker, this).detach();
}

}  // namespace einsummable::cpu
