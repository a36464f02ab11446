#include "cpu/rendezvous.h"

#include <algorithm>
#include <sstream>

#include "cpu/huge_pages.h"

namespace einsummable::cpu {
namespace {

// What a woken thread should at least have to do.
constexpr double kWorthWakingBytes = 256 << 10;

}  // namespace

// The moves of a large exchange, done by whichever threads have time.
class Rendezvous::Moves : public Work {
 public:
  Moves(std::shared_ptr<Rendezvous> owner, const Buffers& buffers)
      : owner_(std::move(owner)), buffers_(buffers),
        tasks_(owner_->exchange_->schedule.view(), owner_->flags_.get(), buffers_,
               owner_->exchange_->workers_per_rank) {}

  void Run() override {
    if (tasks_.Run()) owner_->EndAll();
  }

 private:
  const std::shared_ptr<Rendezvous> owner_;
  const Buffers buffers_;
  Tasks tasks_;
};

Rendezvous::Rendezvous(std::shared_ptr<Exchange> exchange, Arena& arena, Pool& pool, std::function<void()> closed)
    : exchange_(std::move(exchange)), arena_(arena), pool_(pool), closed_(std::move(closed)), begin_ns_(NowNs()),
      calls_(exchange_->program->num_devices),
      buffers_(exchange_->program->num_devices) {
  const ScheduleView schedule = exchange_->schedule.view();
  const int64_t bytes = schedule.header().scratch_bytes;
  if (bytes == 0) return;
  scratch_block_ = arena_.Take(static_cast<size_t>(bytes));
  char* next = scratch_block_.first;
  for (int32_t rank = 0; rank < schedule.header().num_ranks; ++rank) {
    scratch_.push_back(next);
    next += schedule.rank(rank).scratch_bytes;
  }
}

Rendezvous::~Rendezvous() {
  if (scratch_block_.first != nullptr) arena_.Give(scratch_block_);
  if (flags_) exchange_->spare_flags.Give(std::move(flags_));
}

void Rendezvous::Arrive(int64_t rank, std::unique_ptr<RankCall> call) {
  bool complete = false;
  {
    std::lock_guard lock(mutex_);
    if (failure_) {
      call->failure = failure_;
    } else {
      buffers_[rank] = call->buffers.data();
      calls_[rank] = std::move(call);
      ++num_arrived_;
      complete = IsComplete();
    }
  }
  if (call) return call->End();
  if (!complete) return;
  AdviseOutputs();
  RunMoves();
}

// With all ranks here, before the first move.
void Rendezvous::AdviseOutputs() {
  const Program& program = *exchange_->program;
  if (exchange_->schedule.view().header().traffic_bytes < kHugeBufferBytes) return;
  for (size_t rank = 0; rank < calls_.size(); ++rank) {
    if (!calls_[rank]) continue;
    const auto& sizes = program.sizes[rank];
    const size_t first = sizes[static_cast<int>(Space::kInput)].size();
    const auto& outputs = sizes[static_cast<int>(Space::kOutput)];
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int64_t bytes = outputs[i] * program.item_size;
      if (bytes >= kHugeBufferBytes) AdviseHugePages(calls_[rank]->buffers[first + i], bytes);
    }
  }
}

void Rendezvous::RunMoves() {
  const ScheduleView schedule = exchange_->schedule.view();
  const double traffic_bytes = schedule.header().traffic_bytes;
  const Buffers buffers = {buffers_.data(), scratch_.data(), traffic_bytes > kStreamBytes};
  if (traffic_bytes < kInlineBytes) {
    RunAlone(schedule, buffers);
    return EndAll();
  }
  flags_ = exchange_->spare_flags.Take();
  pool_.Share(std::make_shared<Moves>(shared_from_this(), buffers),
              static_cast<int64_t>(traffic_bytes / kWorthWakingBytes) - 1);
}

// Has the calls of all ranks that are here ended. No lock: they have all arrived, or no more will be let in.
void Rendezvous::EndAll() {
  const ScheduleView schedule = exchange_->schedule.view();
  for (int32_t rank = 0; rank < schedule.header().num_ranks; ++rank) {
    if (!calls_[rank]) continue;
    if (failure_) {
      calls_[rank]->failure = failure_;
    } else {
      (*exchange_->counters)[rank].bytes_received += schedule.rank(rank).bytes_received;
    }
  }
  if (!failure_) closed_();
  pool_.Complete(shared_from_this());
}

bool Rendezvous::EndNext() {
  while (true) {
    const size_t rank = next_to_end_.fetch_add(1, std::memory_order_relaxed);
    if (rank >= calls_.size()) return false;
    if (!calls_[rank]) continue;
    const std::unique_ptr<RankCall> call = std::move(calls_[rank]);
    call->End();
    return true;
  }
}

int64_t Rendezvous::num_left() const {
  return std::max<int64_t>(0, static_cast<int64_t>(calls_.size()) -
                                  static_cast<int64_t>(next_to_end_.load(std::memory_order_relaxed)));
}

void Rendezvous::Fail(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_ || IsComplete()) return;
    failure_ = failure;
  }
  EndAll();
}

std::optional<Failure> Rendezvous::Overdue(int64_t deadline_ns, double timeout_s) {
  if (begin_ns_ > deadline_ns) return std::nullopt;
  std::lock_guard lock(mutex_);
  if (failure_ || IsComplete()) return std::nullopt;
  std::ostringstream missing, arrived;
  for (size_t rank = 0; rank < calls_.size(); ++rank) {
    if (!exchange_->Participates(static_cast<int64_t>(rank))) continue;
    std::ostringstream& list = calls_[rank] ? arrived : missing;
    list << (list.tellp() > 0 ? ", " : "") << rank;
  }
  std::ostringstream message;
  message << exchange_->Title() << ": within " << timeout_s
          << " s no call came from device rank(s) " << missing.str() << "; arrived: " << arrived.str()
          << ". Every device must run the exchange, in the same order as other exchanges; if the missing ones are "
             "only slow, raise EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S. XLA has no thread for them where jitted programs "
             "are launched more than 32 times without waiting for a result: call jax.block_until_ready every few "
             "launches, or set the environment variable NPROC before JAX starts, to the number of devices times one "
             "more than that of the threads that launch";
  return Failure{Failure::Kind::kMissingRank, message.str()};
}

}  // namespace einsummable::cpu
