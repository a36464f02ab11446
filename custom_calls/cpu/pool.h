// The engine's threads. They copy, and they end calls, which runs what XLA does next on that rank.
//
// No call ends in a thread that XLA lends us for another call: what XLA does next may block (its own collectives do)
// until the rank of that very call goes on.
//
// The thread that has slept least is woken first: what launches that follow each other touch is in its core's cache.
#pragma once

#include <atomic>
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

// Calls of the ranks of an exchange that are to be ended: what XLA does next on each rank then runs.
class Endings {
 public:
  virtual ~Endings() = default;
  // Ends a call that no thread has begun to end; false if there is none.
  virtual bool EndNext() = 0;
  // How many no thread has begun to end.
  virtual int64_t num_left() const = 0;
  // Smoothed time that one takes, read and updated.
  virtual std::atomic<int64_t>& typical_ns() = 0;
};

class Pool {
 public:
  Pool();

  // Offers `work` to the other threads, of which up to `helpers` are woken, and does its share of it.
  void Share(const std::shared_ptr<Work>& work, int64_t helpers);

  // Has the calls ended by threads of the pool: this one if it is one, and more of them when that takes long.
  void Complete(const std::shared_ptr<Endings>& endings);

  // Adds threads if calls have waited for their end for long: those before them may block until these have ended.
  void Rescue();

  // Calls that wait for a thread to end them.
  int64_t num_pending();

 private:
  struct Pending {
    std::shared_ptr<Endings> endings;
    int64_t queued_ns;
  };
  struct Job {
    std::shared_ptr<Work> work;
    std::shared_ptr<Endings> endings;
  };

  // A thread that waits for something to do.
  struct Sleeper {
    std::condition_variable wake;
    bool is_woken = false;
  };

  void Worker();
  Job Next();
  void DropEnded();  // with mutex_ held
  int64_t CountPending();  // likewise
  void Forget(const std::shared_ptr<Work>& work);
  void End(Endings& endings);
  void Wake(int64_t threads);

  const int64_t num_threads_;
  int64_t num_rescuers_ = 0;
  std::mutex mutex_;
  std::vector<Sleeper*> sleepers_;  // the last one is woken first
  std::deque<std::shared_ptr<Work>> work_;
  std::deque<Pending> pending_;
};

int64_t NowNs();

}  // namespace einsummable::cpu
