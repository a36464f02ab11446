#include "cpu/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "cpu/float_mode.h"
#include "cpu/huge_pages.h"

namespace einsummable::cpu {
namespace {

// Exchanges that read and write less than this are run by the thread of the last rank to arrive alone: waking another
// one takes about as long.
constexpr double kInlineBytes = 1 << 20;
// What a woken thread should at least have to do.
constexpr double kWorthWakingBytes = 256 << 10;
// Exchanges that read and write more than this bypass the caches.
constexpr double kStreamBytes = 64 << 20;

}  // namespace

// One round, done part by part by whichever threads have time.
class Rendezvous::RoundWork : public Work {
 public:
  RoundWork(std::shared_ptr<Rendezvous> owner, size_t number)
      : owner_(std::move(owner)), number_(number), parts_(owner_->exchange_->schedule.rounds[number].parts),
        left_(parts_.size()) {}

  bool RunPart() override {
    const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= parts_.size()) return false;
    {
      const FloatMode mode(Denormals::kKeep);
      owner_->RunPart(parts_[index]);
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) owner_->BeginRound(number_ + 1);
    return true;
  }

 private:
  const std::shared_ptr<Rendezvous> owner_;
  const size_t number_;
  const std::vector<Part>& parts_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> left_;
};

Rendezvous::Rendezvous(std::shared_ptr<Exchange> exchange, Arena& arena, Pool& pool, std::function<void()> closed)
    : exchange_(std::move(exchange)), arena_(arena), pool_(pool), closed_(std::move(closed)), begin_ns_(NowNs()),
      calls_(exchange_->program->num_devices) {
  const int64_t scratch_bytes = exchange_->schedule.scratch_bytes;
  if (scratch_bytes > 0) scratch_ = arena_.Take(static_cast<size_t>(scratch_bytes));
}

Rendezvous::~Rendezvous() {
  if (scratch_.first != nullptr) arena_.Give(scratch_);
}

void Rendezvous::Arrive(int64_t rank, std::unique_ptr<RankCall> call) {
  bool complete = false;
  {
    std::lock_guard lock(mutex_);
    if (failure_) {
      call->failure = failure_;
    } else {
      calls_[rank] = std::move(call);
      ++num_arrived_;
      complete = IsComplete();
    }
  }
  if (call) return call->End();
  if (!complete) return;
  AdviseOutputs();
  if (exchange_->schedule.traffic_bytes < kInlineBytes) {
    RunInline();
  } else {
    BeginRound(0);
  }
}

// With all ranks here, before the first move.
void Rendezvous::AdviseOutputs() {
  const Program& program = *exchange_->program;
  if (exchange_->schedule.traffic_bytes < kHugeBufferBytes) return;
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

void Rendezvous::RunInline() {
  {
    const FloatMode mode(Denormals::kKeep);
    for (const Round& round : exchange_->schedule.rounds) {
      if (round.copies.empty()) {
        for (const Part& part : round.parts) RunPart(part);
      }
      for (const PlainCopy& copy : round.copies) {
        std::memcpy(calls_[copy.destination_device]->buffers[copy.destination_slot] + copy.destination_byte,
                    calls_[copy.source_device]->buffers[copy.source_slot] + copy.source_byte,
                    static_cast<size_t>(copy.bytes));
      }
    }
  }
  EndAll();
}

void Rendezvous::BeginRound(size_t number) {
  const auto& rounds = exchange_->schedule.rounds;
  if (number == rounds.size()) return EndAll();
  const auto helpers = static_cast<int64_t>(rounds[number].traffic_bytes / kWorthWakingBytes) - 1;
  pool_.Share(std::make_shared<RoundWork>(shared_from_this(), number),
              std::min(helpers, static_cast<int64_t>(rounds[number].parts.size()) - 1));
}

char* Rendezvous::AddressOf(const Slice& slice) const {
  const int64_t offset_bytes = slice.offset * exchange_->program->item_size;
  if (slice.space != Space::kScratch) return calls_[slice.device]->buffers[slice.slot] + offset_bytes;
  return scratch_.first + exchange_->schedule.scratch_offsets[slice.device][slice.buffer] + offset_bytes;
}

void Rendezvous::RunPart(const Part& part) {
  static const RunFn run = BestRun();
  constexpr size_t kFew = 64;
  const Program& program = *exchange_->program;
  const Move& move = program.moves[part.move];
  const char* few[kFew];
  std::vector<const char*> many;
  const char** sources = few;
  if (move.sources.size() > kFew) {
    many.resize(move.sources.size());
    sources = many.data();
  }
  for (size_t s = 0; s < move.sources.size(); ++s) sources[s] = AddressOf(move.sources[s]);
  const BoundMove bound = {&move, program.dtype, AddressOf(move.destination), sources};
  run(bound, part.begin, part.end, exchange_->schedule.traffic_bytes > kStreamBytes);
}

// Ends the calls of all ranks that are here. No lock: they have all arrived, or no more will be let in.
void Rendezvous::EndAll() {
  std::vector<std::unique_ptr<Ending>> ending;
  ending.reserve(calls_.size());
  for (size_t rank = 0; rank < calls_.size(); ++rank) {
    if (!calls_[rank]) continue;
    if (!failure_) exchange_->counters[rank]->bytes_received += exchange_->schedule.bytes_received[rank];
    calls_[rank]->failure = failure_;
    ending.push_back(std::move(calls_[rank]));
  }
  if (!failure_) closed_();
  pool_.Complete(std::move(ending), std::shared_ptr<std::atomic<int64_t>>(exchange_, &exchange_->continuation_ns));
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
    if (!exchange_->schedule.participates[rank]) continue;
    std::ostringstream& list = calls_[rank] ? arrived : missing;
    list << (list.tellp() > 0 ? ", " : "") << rank;
  }
  std::ostringstream message;
  message << exchange_->Title() << ": within " << timeout_s
          << " s no call came from device rank(s) " << missing.str() << "; arrived: " << arrived.str()
          << ". Every device must run the exchange, in the same order as other exchanges; if the missing ones are "
             "only slow, raise EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S";
  return Failure{Failure::Kind::kMissingRank, message.str()};
}

}  // namespace einsummable::cpu
