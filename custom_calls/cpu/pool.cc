#include "cpu/pool.h"

#include <algorithm>
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
  work->Run();
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
  if (pending_.empty()) return false;
  pending = std::move(pending_.front());
  pending_.pop_front();
  return true;
}

// Ends calls until there are none; when that takes long, the other threads are woken to help.
void Pool::Drain() {
  const FloatMode mode(Denormals::kFlush);
  int64_t begin = NowNs();
  int64_t now = begin;
  for (Pending pending; Pop(pending);) {
    pending.call->End();
    pending.call = nullptr;
    const int64_t before = std::exchange(now, NowNs());
    Smooth(*pending.typical_ns, now - before);
    if (now - begin < kWorthWakingNs) continue;
    begin = now;
    Wake(num_pending() - 1);
  }
}

int64_t Pool::num_pending() {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(pending_.size());
}

void Pool::Complete(std::vector<std::unique_ptr<Ending>> calls,
                    const std::shared_ptr<std::atomic<int64_t>>& typical_ns) {
  if (calls.empty()) return;
  const int64_t count = static_cast<int64_t>(calls.size());
  const int64_t now = NowNs();
  {
    std::lock_guard lock(mutex_);
    for (auto& call : calls) pending_.push_back({std::move(call), typical_ns, now});
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
    wake_.wait(lock, [&] { return !pending_.empty() || !work_.empty(); });
    --idle_;
    if (!work_.empty()) {
      std::shared_ptr<Work> work = work_.front();
      lock.unlock();
      work->Run();
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
    if (pending_.empty() || NowNs() - pending_.front().queued_ns < kStuckNs) return;
    added = std::min<int64_t>(static_cast<int64_t>(pending_.size()), kMaxRescuers - num_rescuers_);
    num_rescuers_ += added;
  }
  for (int64_t i = 0; i < added; ++i) std::thread(&Pool::Worker, this).detach();
}

}  // namespace einsummable::cpu
