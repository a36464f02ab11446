// The interpreter's memory on the CPU: buffers and flags that all threads see, and waits that do not wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "core/interpreter.h"
#include "cpu/flags.h"

namespace einsummable::cpu {

// Where the buffers of one call are, and how its parts are run.
struct Buffers {
  char* const* const* ranks;  // by rank and slot; null for a rank that takes no part
  char* const* scratch;       // by rank
  bool stream;                // bypass the caches

  char* At(const FlatAddress& place) const {
    char* base = place.slot == FlatAddress::kScratch ? scratch[place.device] : ranks[place.device][place.slot];
    return base + place.offset;
  }
};

// Copies or aggregates a part of any kind.
void RunPart(const ScheduleView& schedule, const FlatPart& part, const Buffers& buffers);

// A call runs once all ranks are here, with scratch memory of its own. So no rank fails in it, addresses are known, and
// there is one copy of the scratch memory.
class Memory {
 public:
  // `alone`: the rank has one worker.
  Memory(const Buffers& buffers, RankFlags* flags, int32_t rank, bool alone)
      : buffers_(buffers), flags_(flags), rank_(rank), alone_(alone) {}

  int32_t Lane() const { return 0; }
  int32_t Lanes() const { return 1; }
  bool All(bool x) { return x; }
  uint64_t Count() { return flags_[rank_].count.load(std::memory_order_acquire); }
  uint64_t AddToCount() {
    std::atomic<uint64_t>& count = flags_[rank_].count;
    if (!alone_) return count.fetch_add(1, std::memory_order_acq_rel) + 1;
    const uint64_t next = count.load(std::memory_order_relaxed) + 1;
    count.store(next, std::memory_order_release);  // many times faster than an addition
    return next;
  }
  uint64_t Progress(int32_t peer) { return flags_[peer].progress.load(std::memory_order_acquire); }
  void Publish(int32_t, uint64_t stamp) { flags_[rank_].progress.store(stamp, std::memory_order_release); }
  bool Pause(int32_t, uint64_t, uint64_t) { return false; }
  void Fail(int32_t, uint64_t) {}
  bool Failed() { return false; }
  void Announce(uint64_t) {}
  void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t) {
    if (part.bytes == 0 || buffers_.stream) return RunPart(schedule, part, buffers_);
    std::memcpy(buffers_.At(part.destination), buffers_.At(part.source), static_cast<size_t>(part.bytes));
  }

 private:
  const Buffers& buffers_;
  RankFlags* flags_;
  int32_t rank_;
  bool alone_;
};

}  // namespace einsummable::cpu
