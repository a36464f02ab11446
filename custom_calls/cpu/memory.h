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

// Runs a part that is no plain copy, or one past the caches.
void RunOtherPart(const ScheduleView& schedule, const FlatPart& part, const Buffers& buffers);

inline void RunPart(const ScheduleView& schedule, const FlatPart& part, const Buffers& buffers) {
  if (part.bytes == 0 || buffers.stream) return RunOtherPart(schedule, part, buffers);
  std::memcpy(buffers.At(part.destination), buffers.At(part.source), static_cast<size_t>(part.bytes));
}

// A call runs once all ranks are here, with scratch memory of its own. So no rank fails in it, addresses are known, and
// there is one copy of the scratch memory.
class Memory {
 public:
  Memory(const Buffers& buffers, RankFlags* flags, int32_t rank) : buffers_(buffers), flags_(flags), rank_(rank) {}

  int32_t Lane() const { return 0; }
  int32_t Lanes() const { return 1; }
  bool All(bool x) { return x; }
  uint64_t Count() { return flags_[rank_].count.load(std::memory_order_acquire); }
  uint64_t AddToCount() { return flags_[rank_].count.fetch_add(1, std::memory_order_acq_rel) + 1; }
  uint64_t Progress(int32_t peer) { return flags_[peer].progress.load(std::memory_order_acquire); }
  void Publish(int32_t, uint64_t stamp) { flags_[rank_].progress.store(stamp, std::memory_order_release); }
  bool Pause(int32_t, uint64_t, uint64_t) { return false; }
  void Fail(int32_t, uint64_t) {}
  bool Failed() { return false; }
  void Announce(uint64_t) {}
  void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t) { RunPart(schedule, part, buffers_); }

 private:
  const Buffers& buffers_;
  RankFlags* flags_;
  int32_t rank_;
};

// Where one thread runs the rounds of all ranks in turn: there is nothing to wait for.
class OneThreadMemory {
 public:
  explicit OneThreadMemory(const Buffers& buffers) : buffers_(buffers) {}

  int32_t Lane() const { return 0; }
  int32_t Lanes() const { return 1; }
  bool All(bool x) { return x; }
  uint64_t Count() { return 0; }
  uint64_t AddToCount() { return 0; }
  uint64_t Progress(int32_t) { return kPoison - 1; }
  void Publish(int32_t, uint64_t) {}
  bool Pause(int32_t, uint64_t, uint64_t) { return false; }
  void Fail(int32_t, uint64_t) {}
  bool Failed() { return false; }
  void Announce(uint64_t) {}
  void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t) { RunPart(schedule, part, buffers_); }

 private:
  const Buffers& buffers_;
};

}  // namespace einsummable::cpu
