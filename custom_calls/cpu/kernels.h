// Copies and aggregations over strided boxes: how the CPU engine runs a part.
#pragma once

#include <cstdint>

#include "core/program.h"

namespace einsummable::cpu {

// A move with the addresses of its slices: where the first element of each is in memory.
struct BoundMove {
  Monoid monoid;
  DType dtype;
  int32_t rank;
  int64_t num_sources;
  const int64_t* extents;
  bool contiguous;  // a copy of one run of memory to another
  char* destination;
  const int64_t* destination_strides;
  const char* const* sources;            // one per source
  const int64_t* const* source_strides;  // likewise
};

// Runs elements [begin, end) of the move's box, counted in row-major order. `stream` asks for stores that
// bypass the caches, where the machine has them.
using RunFn = void (*)(const BoundMove& bound, int64_t begin, int64_t end, bool stream);

// The variant built for what this machine's processor can do.
RunFn BestRun();

}  // namespace einsummable::cpu
