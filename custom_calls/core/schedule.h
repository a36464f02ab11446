// What may run when: the dependences between the moves of a program and the arrival of its ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "core/program.h"

namespace einsummable {

struct Schedule {
  // For each move: how many arrivals and how many earlier moves it waits for.
  std::vector<int32_t> waits;
  // For each move: the moves of later rounds that read or write what it writes.
  std::vector<std::vector<int32_t>> successors;
  // For each rank: the moves that wait for its arrival.
  std::vector<std::vector<int32_t>> moves_of_rank;
  // For each rank: how many moves read or write its inputs or outputs. Its call is over when all are done.
  std::vector<int32_t> uses_of_rank;
  // For each move: the distinct ranks whose inputs or outputs it reads or writes.
  std::vector<std::vector<int32_t>> ranks_of_move;
  // Number of ranks with a move.
  int32_t num_participants = 0;
  // For each device and scratch buffer: byte offset in one scratch block of `scratch_bytes`.
  std::vector<std::vector<int64_t>> scratch_offsets;
  int64_t scratch_bytes = 0;
  // Bytes read and written in all; a double, since nothing bounds the number of moves.
  double traffic_bytes = 0;
};

Schedule MakeSchedule(const Program& program);

}  // namespace einsummable
