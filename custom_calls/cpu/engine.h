// The engine of the process: finds the rendezvous that a call belongs to and watches over those that wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/arena.h"
#include "cpu/exchange.h"
#include "cpu/pool.h"
#include "cpu/rendezvous.h"

namespace einsummable::cpu {

// Which copy of a program in which launch makes a call: what tells apart calls of one exchange id.
struct Origin {
  int64_t run_id;
  int64_t instance;  // of the instruction when all ranks share it, else the value of the token; 0 without either
};

class Engine {
 public:
  // The one engine. Never destroyed; a forked child gets a new one.
  static Engine& Get();

  // Runs `rank`'s part of `exchange`. Never waits: the call is ended when the moves are done.
  void Call(const std::shared_ptr<Exchange>& exchange, const Origin& origin, int64_t rank,
            std::unique_ptr<RankCall> call);

  // Ends every call of the launch that waits, and every later one, with `failure`. `overdue_ns`: now, if it is that
  // ranks have not come.
  void FailRun(int64_t run_id, const Failure& failure, int64_t overdue_ns = 0);

  void set_timeout_s(double timeout_s) { timeout_s_.store(timeout_s); }
  double timeout_s() const { return timeout_s_.load(); }

  // Exchanges that some rank has entered and not every rank has left.
  int64_t num_open();

 private:
  // Run id, exchange id, instance.
  using Key = std::tuple<int64_t, int64_t, int64_t>;

  // The occurrences of one exchange in one launch, of which the closed ones at the front are forgotten.
  struct Occurrences {
    int64_t first = 0;  // number of the occurrence at the front
    std::deque<std::shared_ptr<Rendezvous>> open;
    std::vector<bool> closed;           // of those in `open`
    std::vector<int64_t> next_of_rank;  // number of the occurrence that each rank's next call belongs to
  };

  // A launch that has failed, remembered for calls that come late.
  struct FailedRun {
    int64_t run_id;
    Failure failure;
    int64_t overdue_ns;  // when ranks were given up that had not come, 0 if it failed otherwise
  };

  // Launches that were queued behind one that failed for want of threads: they fail at once.
  struct Backlog {
    std::string message;  // of the one that failed
    int64_t begin_ns, last_ns;
  };

  Engine();
  std::optional<Failure> FailureOf(const std::shared_ptr<Exchange>& exchange, int64_t run_id);
  std::shared_ptr<Rendezvous> Find(const std::shared_ptr<Exchange>& exchange, const Origin& origin, int64_t rank,
                                   std::optional<Failure>& failure);
  Occurrences& OccurrencesOf(const Key& key, int64_t num_ranks);
  std::shared_ptr<Rendezvous> Open(const Key& key, Occurrences& occurrences, const std::shared_ptr<Exchange>& exchange);
  void Close(const Key& key, int64_t number);
  void Watch();
  void FailOverdue();

  Pool pool_;
  Arena arena_;
  std::atomic<double> timeout_s_;
  std::mutex mutex_;
  using Exchanges = std::map<Key, Occurrences>;
  Exchanges exchanges_;
  std::vector<Exchanges::node_type> spare_;  // emptied entries, to be used again
  std::deque<FailedRun> failed_runs_;
  std::optional<Backlog> backlog_;
  std::condition_variable watch_;
  bool watching_ = false;
};

}  // namespace einsummable::cpu
