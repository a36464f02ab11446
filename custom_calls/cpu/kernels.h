// Copies and aggregations over strided boxes: the memory operations of the CPU engine.
#pragma once

#include <cstdint>

#include "core/program.h"

namespace einsummable::cpu {

// A move with the addresses of its slices: where the first element of each is in memory.
struct BoundMove {
  const Move* move;
  DType dtype;
  char* destination;
  const char* const* sources;  // one per source of the move
};

// Runs elements [begin, end) of the move's box, counted in row-major order. `stream` asks for stores that
// bypass the caches, where the machine has them.
using RunFn = void (*)(const BoundMove& bound, int64_t begin, int64_t end, bool stream);

// The variant built for what this machine's processor can do.
RunFn BestRun();

}  // namespace einsummable::cpu
