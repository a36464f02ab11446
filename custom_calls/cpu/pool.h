// The engine's threads. They copy, and they end calls, which runs what XLA does next on that rank.
//
// No call ends in a thread that XLA lends us for another call: what XLA does next may block (its own collectives do)
// until the rank of that very call goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace einsummable::cpu {

// A divisible piece of work that several threads do together.
class Work {
 public:
  virtual ~Work() = default;
  // Does what no other thread does, until nothing is left to begin.
  virtual void Run() = 0;
};

// The call of one rank, to be ended once: what XLA does next on that rank then runs.
class Ending {
 public:
  virtual ~Ending() = default;
  virtual void End() = 0;
};

class Pool {
 public:

  Pool();

  // Offers `work` to the other threads, of which up to `helpers` are woken, and does its share of it.
  void Share(std::shared_ptr<Work> work, int64_t helpers);

  // Has the calls ended by a thread of the pool: this one if it is one, and more of them when that takes long.
  // `typical_ns` is the smoothed time for one, read and updated.
  void Complete(std::vector<std::unique_ptr<Ending>> calls, const std::shared_ptr<std::atomic<int64_t>>& typical_ns);

  // Adds threads if calls have waited for their end for long: those before them may block until these have ended.
  void Rescue();

  // Calls that wait for a thread to end them.
  int64_t num_pending();

 private:
  struct Pending {
    std::unique_ptr<Ending> call;
    std::shared_ptr<std::atomic<int64_t>> typical_ns;
    int64_t queued_ns = 0;
  };

  void Worker();
  void Drain();
  bool Pop(Pending& pending);
  void Wake(int64_t threads);
  void Forget(const std::shared_ptr<Work>& work);  // with mutex_ held

  const int64_t num_threads_;
  int64_t num_rescuers_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  int64_t idle_ = 0;
  std::deque<std::shared_ptr<Work>> work_;
  std::deque<Pending> pending_;
};

int64_t NowNs();

}  // namespace einsummable::cpu
