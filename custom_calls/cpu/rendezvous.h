// One occurrence of an exchange: the calls of its ranks meet here, and its moves run as their ranks arrive.
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
#include "cpu/kernels.h"
#include "cpu/pool.h"

namespace einsummable::cpu {

// Ends the call of one rank: with nothing on success, with a message on failure.
using Finish = std::function<void(const std::optional<std::string>& error)>;

// The buffers of one rank's call, in the order of the program.
struct RankBuffers {
  std::vector<char*> inputs;
  std::vector<char*> outputs;
};

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  // `closed` is called once, when every participant has arrived and every move is done.
  Rendezvous(std::shared_ptr<Exchange> exchange, Arena& arena, Pool& pool, std::function<void()> closed);
  ~Rendezvous();

  // Brings in `rank`. `finish` is called when no move needs its buffers any more, perhaps before this returns.
  void Arrive(int64_t rank, RankBuffers buffers, Finish finish);

  // Ends the calls of all ranks that have arrived, and of those that will, with `error`; waits for no move, but
  // the calls end only after the moves that are running.
  void Fail(const std::string& error);

  // If it has waited since before `deadline_ns` for a rank: what to tell the user.
  std::optional<std::string> Overdue(int64_t deadline_ns, double timeout_s);

  const Exchange& exchange() const { return *exchange_; }

 private:
  struct Rank {
    bool arrived = false;
    RankBuffers buffers;
    int32_t uses = 0;
    Finish finish;
  };
  class Parts;
  using Finished = std::vector<Pool::Completion>;

  char* AddressOf(const Slice& slice) const;
  void RunAll(int64_t last);
  void Start(std::vector<int32_t> moves);
  void RunPart(int32_t move, int64_t begin, int64_t end);
  void Run(const Move& move, int64_t begin, int64_t end);
  void MoveDone(int32_t move);
  void EndRank(Rank& rank, Finished& finished);
  void TakeFailed(Finished& finished);
  void Settle(Finished finished, bool closed);
  bool IsClosed() const;

  const std::shared_ptr<Exchange> exchange_;
  Arena& arena_;
  Pool& pool_;
  const std::function<void()> closed_;
  const int64_t begin_ns_;
  const RunFn run_;
  std::pair<char*, size_t> scratch_{nullptr, 0};

  std::mutex mutex_;
  std::vector<Rank> ranks_;
  int32_t num_arrived_ = 0;
  std::vector<int32_t> waits_;
  int64_t moves_left_;
  int64_t moves_running_ = 0;
  std::optional<std::string> error_;
  std::atomic<bool> failed_{false};
  std::unique_ptr<std::atomic<int64_t>[]> parts_left_;
};

}  // namespace einsummable::cpu
