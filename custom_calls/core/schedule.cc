#include "core/schedule.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace einsummable {
namespace {

inline constexpr int64_t kAlignment = 64;

// The elements from the first to the last that a slice touches: an outer bound of what it touches.
struct Extent {
  int64_t first, last;
  bool Meets(const Extent& other) const { return first <= other.last && other.first <= last; }
};

Extent ExtentOf(const Move& move, const Slice& slice) {
  int64_t last = slice.offset;
  for (int32_t dim = 0; dim < move.rank; ++dim) last += (move.extents[dim] - 1) * slice.strides[dim];
  return {slice.offset, last};
}

using BufferKey = std::tuple<int32_t, Space, int32_t>;

BufferKey KeyOf(const Slice& slice) { return {slice.device, slice.space, slice.buffer}; }

void SortUnique(std::vector<int32_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

// The moves of earlier rounds that write where `move` reads or writes.
std::vector<int32_t> Predecessors(const Program& program, const std::map<BufferKey, std::vector<int32_t>>& writers,
                                  const Move& move) {
  std::vector<int32_t> found;
  auto collect = [&](const Slice& slice) {
    const auto entry = writers.find(KeyOf(slice));
    if (entry == writers.end()) return;
    const Extent extent = ExtentOf(move, slice);
    for (int32_t writer : entry->second) {
      const Move& earlier = program.moves[writer];
      if (earlier.round < move.round && ExtentOf(earlier, earlier.destination).Meets(extent)) {
        found.push_back(writer);
      }
    }
  };
  collect(move.destination);
  for (const Slice& source : move.sources) collect(source);
  SortUnique(found);
  return found;
}

void AddMoveDependences(const Program& program, Schedule& schedule) {
  std::map<BufferKey, std::vector<int32_t>> writers;
  for (size_t i = 0; i < program.moves.size(); ++i) {
    const Move& move = program.moves[i];
    for (int32_t writer : Predecessors(program, writers, move)) {
      schedule.successors[writer].push_back(static_cast<int32_t>(i));
      ++schedule.waits[i];
    }
    writers[KeyOf(move.destination)].push_back(static_cast<int32_t>(i));
  }
}

void AddRanks(const Program& program, Schedule& schedule) {
  for (size_t i = 0; i < program.moves.size(); ++i) {
    const Move& move = program.moves[i];
    std::vector<int32_t> named = {move.destination.device};
    std::vector<int32_t>& used = schedule.ranks_of_move[i];
    if (move.destination.space != Space::kScratch) used.push_back(move.destination.device);
    for (const Slice& source : move.sources) {
      named.push_back(source.device);
      if (source.space != Space::kScratch) used.push_back(source.device);
    }
    SortUnique(named);
    SortUnique(used);
    for (int32_t rank : named) schedule.moves_of_rank[rank].push_back(static_cast<int32_t>(i));
    for (int32_t rank : used) ++schedule.uses_of_rank[rank];
    schedule.waits[i] += static_cast<int32_t>(named.size());
  }
  for (const auto& moves : schedule.moves_of_rank) schedule.num_participants += !moves.empty();
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

Schedule MakeSchedule(const Program& program) {
  Schedule schedule;
  const size_t num_moves = program.moves.size();
  schedule.waits.resize(num_moves);
  schedule.successors.resize(num_moves);
  schedule.ranks_of_move.resize(num_moves);
  schedule.moves_of_rank.resize(program.num_devices);
  schedule.uses_of_rank.resize(program.num_devices);
  AddMoveDependences(program, schedule);
  AddRanks(program, schedule);
  PlaceScratch(program, schedule);
  for (const Move& move : program.moves) {
    schedule.traffic_bytes +=
        static_cast<double>(move.elements * program.item_size) * static_cast<double>(1 + move.sources.size());
  }
  return schedule;
}

}  // namespace einsummable
