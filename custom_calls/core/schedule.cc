#include "core/schedule.h"

#include <algorithm>
#include <tuple>

namespace einsummable {
namespace {

inline constexpr int64_t kAlignment = 64;
// Bounds the memory that a program takes whatever sizes it claims.
inline constexpr int64_t kMaxPartsPerMove = 4096;

int64_t ElementTraffic(const Program& program, const Move& move) {
  return program.item_size * static_cast<int64_t>(1 + move.sources.size());
}

// Where a part begins to read. Ordered by it, parts that copy the same memory to several devices follow each other
// and find it in the cache.
auto ReadPosition(const Program& program, const Part& part) {
  const Slice& source = program.moves[part.move].sources.front();
  return std::make_tuple(source.space, source.device, source.buffer, source.offset + part.begin);
}

void AddParts(const Program& program, int32_t number, int64_t part_bytes, Round& round) {
  const Move& move = program.moves[number];
  const int64_t traffic = ElementTraffic(program, move);
  const int64_t inner = move.rank == 0 ? 1 : move.extents[move.rank - 1];
  int64_t size = std::max<int64_t>({1, part_bytes / traffic, move.elements / kMaxPartsPerMove});
  if (size > inner) size = size / inner * inner;  // whole rows
  for (int64_t begin = 0; begin < move.elements; begin += size) {
    round.parts.push_back({number, begin, std::min(begin + size, move.elements)});
  }
  round.traffic_bytes += static_cast<double>(move.elements) * static_cast<double>(traffic);
}

bool IsContiguous(const Move& move, const Slice& slice) {
  return move.rank == 0 || (move.rank == 1 && slice.strides[0] == 1);
}

// Lists the parts as plain copies if all of them are.
void AddCopies(const Program& program, Round& round) {
  for (const Part& part : round.parts) {
    const Move& move = program.moves[part.move];
    const Slice& source = move.sources.front();
    const Slice& destination = move.destination;
    if (move.sources.size() != 1 || source.space == Space::kScratch || destination.space == Space::kScratch ||
        !IsContiguous(move, source) || !IsContiguous(move, destination)) {
      round.copies.clear();
      return;
    }
    round.copies.push_back({source.device, source.slot, destination.device, destination.slot,
                            (source.offset + part.begin) * program.item_size,
                            (destination.offset + part.begin) * program.item_size,
                            (part.end - part.begin) * program.item_size});
  }
}

void AddRounds(const Program& program, int64_t part_bytes, Schedule& schedule) {
  int32_t round = -1;
  for (size_t i = 0; i < program.moves.size(); ++i) {
    if (program.moves[i].round != round) schedule.rounds.emplace_back();
    round = program.moves[i].round;
    AddParts(program, static_cast<int32_t>(i), part_bytes, schedule.rounds.back());
  }
  for (Round& made : schedule.rounds) {
    std::stable_sort(made.parts.begin(), made.parts.end(), [&](const Part& a, const Part& b) {
      return ReadPosition(program, a) < ReadPosition(program, b);
    });
    AddCopies(program, made);
    schedule.traffic_bytes += made.traffic_bytes;
  }
}

void AddParticipants(const Program& program, Schedule& schedule) {
  schedule.participates.resize(program.num_devices);
  schedule.bytes_received.resize(program.num_devices);
  for (const Move& move : program.moves) {
    // Wraps for sizes that no machine has.
    schedule.bytes_received[move.destination.device] += static_cast<int64_t>(
        static_cast<uint64_t>(move.remote_sources) * static_cast<uint64_t>(move.elements * program.item_size));
    schedule.participates[move.destination.device] = true;
    for (const Slice& source : move.sources) schedule.participates[source.device] = true;
  }
  schedule.num_participants =
      static_cast<int32_t>(std::count(schedule.participates.begin(), schedule.participates.end(), true));
}

void PlaceScratch(const Program& program, Schedule& schedule) {
  schedule.scratch_offsets.resize(program.num_devices);
  for (int32_t device = 0; device < program.num_devices; ++device) {
    for (int64_t size : program.sizes[device][static_cast<int>(Space::kScratch)]) {
      schedule.scratch_offsets[device].push_back(schedule.scratch_bytes);
      const int64_t bytes = size * program.item_size;
      schedule.scratch_bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
}

}  // namespace

Schedule MakeSchedule(const Program& program, int64_t part_bytes) {
  Schedule schedule;
  AddRounds(program, part_bytes, schedule);
  AddParticipants(program, schedule);
  PlaceScratch(program, schedule);
  return schedule;
}

}  // namespace einsummable
