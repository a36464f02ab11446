#include "cpu/rendezvous.h"

#include <algorithm>
#include <sstream>

#include "cpu/float_mode.h"

namespace einsummable::cpu {
namespace {

// Exchanges that read and write less than this in all run in the thread of the last rank to arrive: waking
// another one takes longer.
constexpr double kInlineBytes = 512 << 10;
// Bytes written by one part of a larger one.
constexpr int64_t kPartBytes = 128 << 10;
// Exchanges that read and write more than this bypass the caches.
constexpr double kStreamBytes = 64 << 20;

}  // namespace

// Moves that may run now, cut into parts.
class Rendezvous::Parts : public Work {
 public:
  struct Part {
    int32_t move;
    int64_t begin, end;
  };

  Parts(std::shared_ptr<Rendezvous> owner, std::vector<Part> parts) : owner_(std::move(owner)), parts_(std::move(parts)) {}

  bool RunPart() override {
    const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= parts_.size()) return false;
    const Part& part = parts_[index];
    owner_->RunPart(part.move, part.begin, part.end);
    return true;
  }

 private:
  const std::shared_ptr<Rendezvous> owner_;
  const std::vector<Part> parts_;
  std::atomic<size_t> next_{0};
};

Rendezvous::Rendezvous(std::shared_ptr<Exchange> exchange, Arena& arena, Pool& pool, std::function<void()> closed)
    : exchange_(std::move(exchange)), arena_(arena), pool_(pool), closed_(std::move(closed)), begin_ns_(NowNs()),
      run_(BestRun()), ranks_(exchange_->program->num_devices), waits_(exchange_->schedule.waits),
      moves_left_(static_cast<int64_t>(exchange_->program->moves.size())) {
  const Schedule& schedule = exchange_->schedule;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) ranks_[rank].uses = schedule.uses_of_rank[rank];
  if (schedule.scratch_bytes > 0) scratch_ = arena_.Take(static_cast<size_t>(schedule.scratch_bytes));
  if (schedule.traffic_bytes >= kInlineBytes) {
    parts_left_ = std::make_unique<std::atomic<int64_t>[]>(exchange_->program->moves.size());
  }
}

Rendezvous::~Rendezvous() {
  if (scratch_.first != nullptr) arena_.Give(scratch_);
}

char* Rendezvous::AddressOf(const Slice& slice) const {
  const int64_t item_size = exchange_->program->item_size;
  const RankBuffers& buffers = ranks_[slice.device].buffers;
  switch (slice.space) {
    case Space::kInput: return buffers.inputs[slice.buffer] + slice.offset * item_size;
    case Space::kOutput: return buffers.outputs[slice.buffer] + slice.offset * item_size;
    default: break;
  }
  return scratch_.first + exchange_->schedule.scratch_offsets[slice.device][slice.buffer] + slice.offset * item_size;
}

bool Rendezvous::IsClosed() const {
  return moves_left_ == 0 && num_arrived_ == exchange_->schedule.num_participants;
}

void Rendezvous::EndRank(Rank& rank, Finished& finished) {
  finished.push_back([finish = std::move(rank.finish)] { finish(std::nullopt); });
  rank.finish = nullptr;
}

void Rendezvous::Arrive(int64_t rank_number, RankBuffers buffers, Finish finish) {
  Finished finished;
  std::vector<int32_t> ready;
  bool run_all = false, closed = false;
  {
    std::lock_guard lock(mutex_);
    if (failed_.load()) {
      finished.push_back([finish = std::move(finish), error = error_] { finish(error); });
    } else {
      Rank& rank = ranks_[rank_number];
      rank.arrived = true;
      rank.buffers = std::move(buffers);
      rank.finish = std::move(finish);
      ++num_arrived_;
      if (rank.uses == 0) EndRank(rank, finished);
      if (parts_left_ == nullptr) {
        run_all = num_arrived_ == exchange_->schedule.num_participants;
        moves_running_ += run_all;
      } else {
        for (int32_t move : exchange_->schedule.moves_of_rank[rank_number]) {
          if (--waits_[move] == 0) ready.push_back(move);
        }
        moves_running_ += static_cast<int64_t>(ready.size());
      }
      closed = IsClosed();
    }
  }
  if (run_all) {
    RunAll(rank_number);
  } else if (!ready.empty()) {
    Start(std::move(ready));
  }
  Settle(std::move(finished), closed);
}

// A small exchange whose ranks have all arrived, `last` being the one that this thread is in the call of.
void Rendezvous::RunAll(int64_t last) {
  for (const Move& move : exchange_->program->moves) Run(move, 0, move.elements);
  Finished finished;
  Finish own;
  bool closed;
  {
    std::lock_guard lock(mutex_);
    --moves_running_;
    moves_left_ = 0;
    closed = !failed_.load();
    if (closed) {
      own = std::exchange(ranks_[last].finish, nullptr);
      for (Rank& rank : ranks_) {
        if (rank.finish) EndRank(rank, finished);
      }
    } else {
      TakeFailed(finished);
    }
  }
  if (own) own(std::nullopt);  // nothing continues from it before the call returns
  Settle(std::move(finished), closed);
}

// Begins moves that nothing holds back any more.
void Rendezvous::Start(std::vector<int32_t> moves) {
  const Program& program = *exchange_->program;
  const int64_t part_elements = kPartBytes / program.item_size;
  std::vector<Parts::Part> parts;
  for (int32_t number : moves) {
    const int64_t elements = program.moves[number].elements;
    const int64_t count = (elements + part_elements - 1) / part_elements;
    parts_left_[number].store(count, std::memory_order_relaxed);
    for (int64_t begin = 0; begin < elements; begin += part_elements) {
      parts.push_back({number, begin, std::min(begin + part_elements, elements)});
    }
  }
  const int64_t count = static_cast<int64_t>(parts.size());
  pool_.Share(std::make_shared<Parts>(shared_from_this(), std::move(parts)), count);
}

void Rendezvous::RunPart(int32_t number, int64_t begin, int64_t end) {
  if (!failed_.load(std::memory_order_relaxed)) Run(exchange_->program->moves[number], begin, end);
  if (parts_left_[number].fetch_sub(1, std::memory_order_acq_rel) == 1) MoveDone(number);
}

void Rendezvous::Run(const Move& move, int64_t begin, int64_t end) {
  const FloatMode mode(Denormals::kKeep);
  const Program& program = *exchange_->program;
  constexpr size_t kFew = 32;
  const char* few[kFew];
  std::vector<const char*> many;
  const char** sources = few;
  if (move.sources.size() > kFew) {
    many.resize(move.sources.size());
    sources = many.data();
  }
  for (size_t s = 0; s < move.sources.size(); ++s) sources[s] = AddressOf(move.sources[s]);
  const BoundMove bound = {&move, program.dtype, AddressOf(move.destination), sources};
  run_(bound, begin, end, exchange_->schedule.traffic_bytes > kStreamBytes);
  exchange_->counters[move.destination.device]->bytes_received.fetch_add(
      move.remote_sources * (end - begin) * program.item_size, std::memory_order_relaxed);
}

void Rendezvous::MoveDone(int32_t number) {
  Finished finished;
  std::vector<int32_t> ready;
  bool closed = false;
  {
    std::lock_guard lock(mutex_);
    --moves_running_;
    --moves_left_;
    if (failed_.load()) {
      TakeFailed(finished);
    } else {
      for (int32_t successor : exchange_->schedule.successors[number]) {
        if (--waits_[successor] == 0) ready.push_back(successor);
      }
      moves_running_ += static_cast<int64_t>(ready.size());
      for (int32_t rank : exchange_->schedule.ranks_of_move[number]) {
        if (--ranks_[rank].uses == 0) EndRank(ranks_[rank], finished);
      }
      closed = IsClosed();
    }
  }
  if (!ready.empty()) Start(std::move(ready));
  Settle(std::move(finished), closed);
}

void Rendezvous::Settle(Finished finished, bool closed) {
  if (closed) closed_();
  pool_.Complete(std::move(finished), std::shared_ptr<std::atomic<int64_t>>(exchange_, &exchange_->continuation_ns));
}

// After a failure: once nothing runs, the calls that wait end.
void Rendezvous::TakeFailed(Finished& finished) {
  if (moves_running_ > 0) return;
  for (Rank& rank : ranks_) {
    if (!rank.finish) continue;
    finished.push_back([finish = std::move(rank.finish), error = error_] { finish(error); });
    rank.finish = nullptr;
  }
}

void Rendezvous::Fail(const std::string& error) {
  Finished finished;
  {
    std::lock_guard lock(mutex_);
    if (failed_.load() || IsClosed()) return;
    error_ = error;
    failed_.store(true);
    TakeFailed(finished);
  }
  Settle(std::move(finished), /*closed=*/false);
}

std::optional<std::string> Rendezvous::Overdue(int64_t deadline_ns, double timeout_s) {
  if (begin_ns_ > deadline_ns) return std::nullopt;
  std::lock_guard lock(mutex_);
  if (failed_.load() || num_arrived_ == exchange_->schedule.num_participants) return std::nullopt;
  std::ostringstream missing, arrived;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!exchange_->Participates(static_cast<int64_t>(rank))) continue;
    std::ostringstream& list = ranks_[rank].arrived ? arrived : missing;
    list << (list.tellp() > 0 ? ", " : "") << rank;
  }
  std::ostringstream message;
  message << "exchange " << exchange_->id << " (" << exchange_->name << "): within " << timeout_s
          << " s no call came from device rank(s) " << missing.str() << "; arrived: " << arrived.str()
          << ". Every device must run the exchange, in the same order as other exchanges; if the missing ones are "
             "only slow, raise EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S";
  return message.str();
}

}  // namespace einsummable::cpu
