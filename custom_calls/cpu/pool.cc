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
constexpr int64_t kStuckNs = 50'000'000;

// Whether this thread is running completions already: those added meanwhile are left to that loop, which bounds
// the stack however long a chain of exchanges gets.
thread_local bool draining = false;
thread_local bool is_pool_thread = false;

}  // namespace

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Pool::Pool() : num_threads_(std::max(1, static_cast<int>(std::thread::hardware_concurrency()))) {
  // Detached: the pool lives as long as the process, and exit waits for nobody.
  for (int i = 0; i < num_threads_; ++i) std::thread(&Pool::Worker, this).detach();
}

void Pool::Wake(int64_t threads) {
  for (int64_t i = 0; i < std::min<int64_t>(threads, num_threads_); ++i) wake_.notify_one();
}

void Pool::Share(std::shared_ptr<Work> work, int64_t parts) {
  int64_t wanted = 0;
  {
    std::lock_guard lock(mutex_);
    work_.push_back(work);
    wanted = std::min(parts - 1, idle_);
  }
  Wake(wanted);
  while (work->RunPart()) {
  }
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

// Runs completions until there are none; whenever that takes long, the other threads are woken for the rest, which
// is left to them unless `until_empty`.
void Pool::Drain(bool until_empty) {
  draining = true;
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
    Wake(num_pending());
    if (!until_empty) break;
  }
  draining = false;
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
  if (is_long) Wake(count);
  if (draining || (is_long && !is_pool_thread)) return;
  Drain(/*until_empty=*/is_pool_thread);
}

void Pool::Worker() {
  is_pool_thread = true;
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
    {
      const FloatMode mode(Denormals::kFlush);
      Drain(/*until_empty=*/true);
    }
    lock.lock();
  }
}

void Pool::Rescue() {
  {
    std::lock_guard lock(mutex_);
    if (completions_.empty() || NowNs() - completions_.front().queued_ns < kStuckNs) return;
  }
  std::thread([this] {
    is_pool_thread = true;
    const FloatMode mode(Denormals::kFlush);
    Drain(/*until_empty=*/true);
  }).detach();
}

}  // namespace einsummable::cpu
