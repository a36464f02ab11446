// How a program is run: its rounds cut into parts, and where its scratch buffers are.
#pragma once

#include <cstdint>
#include <vector>

#include "core/program.h"

namespace einsummable {

// Elements [begin, end) of a move's box, in row-major order.
struct Part {
  int32_t move;
  int64_t begin, end;
};

// A move from one contiguous piece of an input or output to another, ready to be run: all of it in one place, as small
// exchanges take about as long to look up as to copy.
struct PlainCopy {
  int32_t source_device, source_slot, destination_device, destination_slot;
  int64_t source_byte, destination_byte, bytes;
};

struct Round {
  std::vector<Part> parts;  // that read the same memory are neighbours
  std::vector<PlainCopy> copies;  // the same as `parts` if all of them are plain copies, else empty
  double traffic_bytes = 0;  // read and written in all; a double, since nothing bounds the number of moves
};

struct Schedule {
  std::vector<Round> rounds;  // without empty ones
  // For each rank: whether some move reads or writes its buffers.
  std::vector<bool> participates;
  int32_t num_participants = 0;
  // For each rank: what is read from other ranks' buffers into its own.
  std::vector<int64_t> bytes_received;
  // For each device and scratch buffer: byte offset in one scratch block of `scratch_bytes`.
  std::vector<std::vector<int64_t>> scratch_offsets;
  int64_t scratch_bytes = 0;
  double traffic_bytes = 0;
};

// `part_bytes`: about how much one part reads and writes.
Schedule MakeSchedule(const Program& program, int64_t part_bytes);

}  // namespace einsummable
