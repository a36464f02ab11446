// A schedule as the interpreter reads it: plain structures in one block of memory that holds no pointers, so that the
// block can be copied to wherever a rank runs. `schedule.h` makes it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EINSUMMABLE_HD __host__ __device__
#else
#define EINSUMMABLE_HD
#endif

namespace einsummable {

// Copies of the scratch memory of a rank that take turns from call to call: call e uses copy e % kSlots.
inline constexpr int32_t kSlots = 2;

// Indices [begin, end) into one of the schedule's arrays.
struct Range {
  int32_t begin, end;

  EINSUMMABLE_HD int32_t size() const { return end - begin; }
};

// A place in a buffer.
struct FlatAddress {
  int32_t device;  // rank that owns the buffer
  int32_t slot;    // of an input or output: its number among the inputs, then outputs, of the device; kScratch else
  int64_t offset;  // in bytes from the start of the buffer or of the copy of the scratch memory

  static constexpr int32_t kScratch = -1;
};

// A strided box of one buffer, which begins at the address.
struct FlatSlice : FlatAddress {
  int32_t strides;  // index in `numbers` of the stride along each dimension, in elements
  int32_t padding;
};

// destination = aggregate of the sources, over a box of `rank` dimensions in row-major order.
struct FlatMove {
  int32_t monoid;       // a `Monoid`
  int32_t rank;
  int32_t num_sources;
  int32_t slices;       // index of the destination's slice; the sources' follow it
  int64_t elements;
  int32_t extents;      // index in `numbers`
  int32_t contiguous;   // 1 for the copy of one run of memory to another
};

// Elements [begin, end) of a move's box, counted in row-major order: what is run without a look at any flag.
struct FlatPart {
  int32_t move;
  int32_t padding;
  int64_t begin, end;
  // Of a contiguous copy also what to copy, so that nothing else need be looked up for it; else `bytes` is 0.
  int64_t bytes;
  FlatAddress source, destination;
};

// Do not go on before `peer` has published `step` of this call. A step of 0 or less is one of the calls before: 0 is
// the last of the call just before.
struct FlatWait {
  int32_t peer, step;
};

// A rank first waits, then does its parts, then publishes `step`.
struct FlatPhase {
  Range waits, parts;
  int32_t step;
};

struct FlatRank {
  Range phases;     // none for a rank that takes no part, else the first is the arrival
  Range end_waits;  // what must have been published before the call may end
  Range listeners;  // in `peers`: the ranks that wait for this one
  int32_t padding;
  int32_t reserved;
  int64_t scratch_bytes;   // of one copy of its scratch memory, a multiple of 64
  int64_t bytes_received;  // what its moves read from other ranks' buffers
};

struct ScheduleHeader {
  int64_t bytes;  // of the whole block
  int64_t item_size;
  int32_t dtype;  // a `DType`
  int32_t num_ranks;
  int32_t num_steps;  // a call publishes steps 1 (the rank has arrived) to num_steps (it has done all its moves)
  int32_t num_participants;
  double traffic_bytes;   // read and written by all moves
  int64_t scratch_bytes;  // of one copy of the scratch memory of all ranks
  // Where each array begins, in bytes from the header.
  int64_t ranks, phases, waits, peers, parts, moves, slices, numbers;
};

class ScheduleView {
 public:
  EINSUMMABLE_HD explicit ScheduleView(const void* block) : block_(static_cast<const char*>(block)) {}

  EINSUMMABLE_HD const ScheduleHeader& header() const { return *reinterpret_cast<const ScheduleHeader*>(block_); }
  EINSUMMABLE_HD const FlatRank& rank(int32_t i) const { return Array<FlatRank>(header().ranks)[i]; }
  EINSUMMABLE_HD const FlatPhase& phase(int32_t i) const { return Array<FlatPhase>(header().phases)[i]; }
  EINSUMMABLE_HD const FlatWait& wait(int32_t i) const { return Array<FlatWait>(header().waits)[i]; }
  EINSUMMABLE_HD const int32_t& peer(int32_t i) const { return Array<int32_t>(header().peers)[i]; }
  EINSUMMABLE_HD const FlatPart& part(int32_t i) const { return Array<FlatPart>(header().parts)[i]; }
  EINSUMMABLE_HD const FlatMove& move(int32_t i) const { return Array<FlatMove>(header().moves)[i]; }
  EINSUMMABLE_HD const FlatSlice& slice(int32_t i) const { return Array<FlatSlice>(header().slices)[i]; }
  EINSUMMABLE_HD const int64_t* numbers(int32_t i) const { return Array<int64_t>(header().numbers) + i; }

  EINSUMMABLE_HD bool Participates(int32_t i) const { return rank(i).phases.size() > 0; }

  EINSUMMABLE_HD const FlatSlice& destination(const FlatMove& move) const { return slice(move.slices); }
  EINSUMMABLE_HD const FlatSlice& source(const FlatMove& move, int32_t i) const { return slice(move.slices + 1 + i); }

 private:
  template <typename T>
  EINSUMMABLE_HD const T* Array(int64_t offset) const {
    return reinterpret_cast<const T*>(block_ + offset);
  }

  const char* block_;
};

}  // namespace einsummable
