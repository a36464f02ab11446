// One occurrence of an exchange: the calls of its ranks meet here, and when all are there its moves run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/arena.h"
#include "cpu/exchange.h"
#include "cpu/memory.h"
#include "cpu/pool.h"
#include "cpu/tasks.h"

namespace einsummable::cpu {

// Why a call ends without its results.
struct Failure {
  enum class Kind { kMissingRank, kInvalid, kHostCall };
  Kind kind;
  std::string message;
};

// One rank's call of the exchange.
class RankCall {
 public:
  virtual ~RankCall() = default;
  // Ends the call, once: what XLA does next on the rank then runs.
  virtual void End() = 0;

  std::vector<char*> buffers;      // inputs, then outputs, in the order of the program
  std::optional<Failure> failure;  // what `End` is to tell the caller
};

class Rendezvous : public Endings, public std::enable_shared_from_this<Rendezvous> {
 public:
  // `closed` is called once, when the moves are done.
  Rendezvous(std::shared_ptr<Exchange> exchange, Arena& arena, Pool& pool, std::function<void()> closed);
  ~Rendezvous() override;

  // Brings in `rank`, whose call ends when the moves are done: other ranks may read its buffers until then. The last
  // to arrive does its share of the moves.
  void Arrive(int64_t rank, std::unique_ptr<RankCall> call);

  // Ends the calls of the ranks that have arrived, and of those that will, with `failure`; does nothing once all
  // have arrived.
  void Fail(const Failure& failure);

  // If it has waited since before `deadline_ns` for a rank: what to tell the user.
  std::optional<Failure> Overdue(int64_t deadline_ns, double timeout_s);

  const Exchange& exchange() const { return *exchange_; }

  bool EndNext() override;
  int64_t num_left() const override;
  std::atomic<int64_t>& typical_ns() override { return exchange_->continuation_ns; }

 private:
  class Moves;

  bool IsComplete() const { return num_arrived_ == exchange_->schedule.view().header().num_participants; }
  void AdviseOutputs();
  void RunMoves();
  void EndAll();

  const std::shared_ptr<Exchange> exchange_;
  Arena& arena_;
  Pool& pool_;
  const std::function<void()> closed_;
  const int64_t begin_ns_;
  std::pair<char*, size_t> scratch_block_{nullptr, 0};
  std::vector<char*> scratch_;  // by rank
  SpareFlags::Flags flags_;

  std::mutex mutex_;  // guards what follows until all ranks have arrived; after that only the moves use it
  std::vector<std::unique_ptr<RankCall>> calls_;  // by rank
  std::vector<char* const*> buffers_;             // by rank, then by slot
  int32_t num_arrived_ = 0;
  std::optional<Failure> failure_;

  // Once they have ended: the ranks before this one have been told, or never came.
  std::atomic<size_t> next_to_end_{0};
};

}  // namespace einsummable::cpu
