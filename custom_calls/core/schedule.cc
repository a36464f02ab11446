#include "core/schedule.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace einsummable {
namespace {

constexpr int64_t kAlignment = 64;
// Bound the memory that a schedule takes whatever sizes its program claims.
constexpr int64_t kMaxPartsPerMove = 4096;
constexpr int64_t kMaxParts = 1 << 20;
// Writes to one buffer that are looked at for one that overlaps a read, before the latest is taken for one.
constexpr int kMaxScan = 64;
// The round of moves that come before the arrival, and that of the waits at the end.
constexpr int64_t kStaging = -1;
constexpr int64_t kEnd = INT32_MAX;

// The step that a rank has published when it is done with a move of `round`.
int64_t StepAfter(int64_t round) { return round + 2; }

// ---- Relations: sorted rows of numbers ----------------------------------------------------------------------------

using Row = std::array<int64_t, 5>;  // columns that a relation does not have are 0
using Relation = std::vector<Row>;

void Sort(Relation& relation) {
  std::sort(relation.begin(), relation.end());
  relation.erase(std::unique(relation.begin(), relation.end()), relation.end());
}

// The rows that begin with these values.
std::span<const Row> Select(std::span<const Row> rows, int64_t first) {
  const auto begin = std::lower_bound(rows.begin(), rows.end(), Row{first, INT64_MIN});
  return {begin, std::lower_bound(begin, rows.end(), Row{first + 1, INT64_MIN})};
}

std::span<const Row> Select(std::span<const Row> rows, int64_t first, int64_t second) {
  const auto begin = std::lower_bound(rows.begin(), rows.end(), Row{first, second, INT64_MIN});
  return {begin, std::lower_bound(begin, rows.end(), Row{first, second + 1, INT64_MIN})};
}

// ---- Which rank does what, and what it waits for ------------------------------------------------------------------

class Planner {
 public:
  Relation moves;      // rank, round, number of a move that it executes
  Relation waits;      // rank, round, peer, step: what to wait for before the round (kEnd: before the call ends)
  Relation listeners;  // rank, a rank that waits for it
  std::vector<bool> participates;        // by rank
  std::vector<int64_t> bytes_received;   // by rank

  Planner(const Program& program, Copies copies)
      : participates(program.num_devices), bytes_received(program.num_devices), program_(program) {
    NumberBuffers();
    for (const Move& move : program.moves) Assign(move, copies);
    Sort(moves);
    Sort(writes_);
    Sort(readers_);
    for (size_t i = 0; i < program.moves.size(); ++i) AddWaits(program.moves[i], executors_[i], rounds_[i]);
    Sort(waits);
    KeepNeeded();
    for (const Row& wait : waits) listeners.push_back({wait[2], wait[0]});
    Sort(listeners);
  }

 private:
  // Copies of a rank's own inputs into its own scratch memory concern no other rank before it has arrived.
  static bool IsStaging(const Move& move) {
    const int32_t device = move.destination.device;
    return move.destination.space == Space::kScratch &&
           std::all_of(move.sources.begin(), move.sources.end(), [&](const Slice& source) {
             return source.device == device && source.space == Space::kInput;
           });
  }

  void NumberBuffers() {
    int64_t count = 0;
    for (const auto& spaces : program_.sizes) {
      for (const auto& sizes : spaces) {
        first_buffers_.push_back(count);
        count += static_cast<int64_t>(sizes.size());
      }
    }
  }

  int64_t BufferOf(const Slice& slice) const {
    return first_buffers_[slice.device * kNumSpaces + static_cast<int>(slice.space)] + slice.buffer;
  }

  // The last element of its buffer that a slice touches.
  static int64_t Last(const Move& move, const Slice& slice) {
    int64_t last = slice.offset;
    for (int32_t dim = 0; dim < move.rank; ++dim) last += (move.extents[dim] - 1) * slice.strides[dim];
    return last;
  }

  void Assign(const Move& move, Copies copies) {
    const bool push = copies == Copies::kPush && move.monoid == Monoid::kCopy;
    const int64_t executor = push ? move.sources.front().device : move.destination.device;
    const int64_t round = IsStaging(move) ? kStaging : move.round;
    moves.push_back({executor, round, static_cast<int64_t>(executors_.size())});
    executors_.push_back(executor);
    rounds_.push_back(round);
    const Slice& written = move.destination;
    writes_.push_back({BufferOf(written), executor, round, written.offset, Last(move, written)});
    participates[move.destination.device] = true;
    for (const Slice& source : move.sources) {
      participates[source.device] = true;
      if (source.space == Space::kScratch) readers_.push_back({BufferOf(source), executor});
    }
    // Wraps for sizes that no machine has.
    int64_t& received = bytes_received[move.destination.device];
    received += static_cast<int64_t>(static_cast<uint64_t>(move.remote_sources) *
                                     static_cast<uint64_t>(move.elements * program_.item_size));
  }

  void AddWaits(const Move& move, int64_t executor, int64_t round) {
    AddUse(move.destination, executor, round);
    for (const Slice& source : move.sources) {
      AddUse(source, executor, round);
      if (source.space != Space::kInput) AddDependences(move, source, executor, round);
    }
    if (move.destination.space != Space::kScratch) return;
    for (const Row& reader : Select(readers_, BufferOf(move.destination))) {
      const int64_t arrival_before = 1 - int64_t{kSlots - 1} * (program_.num_rounds + 1);
      if (reader[1] != executor) waits.push_back({executor, round, reader[1], arrival_before});
    }
  }

  // Another rank's input or output is there once that rank has arrived, and until this move is done.
  void AddUse(const Slice& slice, int64_t executor, int64_t round) {
    if (slice.space == Space::kScratch || slice.device == executor) return;
    waits.push_back({executor, round, slice.device, 1});
    waits.push_back({slice.device, kEnd, executor, StepAfter(round)});
  }

  // For each rank that writes what is read, its latest write of an earlier round that overlaps.
  void AddDependences(const Move& move, const Slice& source, int64_t executor, int64_t round) {
    const int64_t first = source.offset, last = Last(move, source);
    std::span<const Row> left = Select(writes_, BufferOf(source));
    while (!left.empty()) {
      const int64_t writer = left.front()[1];
      const std::span<const Row> writes = Select(left, left.front()[0], writer);
      left = left.subspan(writes.size());
      if (writer == executor) continue;
      auto write = std::lower_bound(writes.begin(), writes.end(), Row{writes.front()[0], writer, round, INT64_MIN});
      for (int scanned = 0; write != writes.begin();) {
        --write;
        const bool overlaps = (*write)[3] <= last && first <= (*write)[4];
        if (!overlaps && ++scanned < kMaxScan) continue;
        waits.push_back({executor, round, writer, StepAfter((*write)[2])});
        break;
      }
    }
  }

  // Of the waits for one peer in one phase, the last step includes the others. What an earlier phase has waited for
  // need not be waited for again, nor the arrival in the call before by who waits for more of the peer in every call.
  void KeepNeeded() {
    std::vector<int64_t> met(program_.num_devices), needed(program_.num_devices);
    Relation kept;
    std::span<const Row> all(waits);
    for (int64_t rank = 0; rank < program_.num_devices; ++rank) {
      const std::span<const Row> rows = Select(all, rank);
      all = all.subspan(rows.size());
      for (const Row& wait : rows) needed[wait[2]] = std::max(needed[wait[2]], wait[3]);
      for (size_t i = 0; i < rows.size(); ++i) {
        const Row& wait = rows[i];
        const bool is_last = i + 1 == rows.size() || rows[i + 1][1] != wait[1] || rows[i + 1][2] != wait[2];
        int64_t& step = met[wait[2]];
        if (wait[3] > 0 ? is_last && wait[3] > step : needed[wait[2]] == 0) kept.push_back(wait);
        if (is_last) step = std::max(step, wait[3]);
      }
      for (const Row& wait : rows) met[wait[2]] = needed[wait[2]] = 0;
    }
    waits = std::move(kept);
  }

  const Program& program_;
  std::vector<int64_t> first_buffers_;        // by device and space
  std::vector<int64_t> executors_, rounds_;   // by move
  Relation writes_;   // buffer, rank that executes the move, round, first and last element
  Relation readers_;  // scratch buffer, rank that reads it
};

// ---- The block ----------------------------------------------------------------------------------------------------

// The arrays of the schedule while they grow.
class Writer {
 public:
  Writer(const Program& program, const ScheduleOptions& options)
      : program_(program), plan_(program, options.copies), part_bytes_(options.part_bytes),
        parts_per_move_(std::clamp<int64_t>(kMaxParts / std::max(1, Count(program.moves)), 1, kMaxPartsPerMove)) {
    header_.item_size = program.item_size;
    header_.dtype = static_cast<int32_t>(program.dtype);
    header_.num_ranks = program.num_devices;
    header_.num_steps = program.num_rounds + 1;
    header_.traffic_bytes = TrafficBytes(program);
    PlaceScratch();
    for (const Move& move : program.moves) AddMove(move);
    for (int32_t r = 0; r < program.num_devices; ++r) AddRank(r);
  }

  std::pair<std::unique_ptr<char[]>, size_t> Pack() {
    int64_t size = Padded(sizeof(ScheduleHeader));
    auto reserve = [&](const auto& array) { return std::exchange(size, size + Padded(Bytes(array))); };
    header_.ranks = reserve(ranks_);
    header_.phases = reserve(phases_);
    header_.waits = reserve(waits_);
    header_.peers = reserve(peers_);
    header_.parts = reserve(parts_);
    header_.moves = reserve(moves_);
    header_.slices = reserve(slices_);
    header_.numbers = reserve(program_.encoding);
    header_.bytes = size;
    auto block = std::make_unique<char[]>(static_cast<size_t>(size));
    auto copy = [&](int64_t offset, const auto& array) {
      if (!array.empty()) std::memcpy(block.get() + offset, array.data(), static_cast<size_t>(Bytes(array)));
    };
    std::memcpy(block.get(), &header_, sizeof(header_));
    copy(header_.ranks, ranks_);
    copy(header_.phases, phases_);
    copy(header_.waits, waits_);
    copy(header_.peers, peers_);
    copy(header_.parts, parts_);
    copy(header_.moves, moves_);
    copy(header_.slices, slices_);
    copy(header_.numbers, program_.encoding);
    return {std::move(block), static_cast<size_t>(size)};
  }

 private:
  static int64_t Padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

  template <typename T>
  static int64_t Bytes(const std::vector<T>& array) {
    return static_cast<int64_t>(array.size() * sizeof(T));
  }

  template <typename T>
  static int32_t Count(const std::vector<T>& array) {
    return static_cast<int32_t>(array.size());
  }

  void PlaceScratch() {
    scratch_offsets_.resize(program_.num_devices);
    for (int32_t device = 0; device < program_.num_devices; ++device) {
      int64_t offset = 0;
      for (int64_t size : program_.sizes[device][static_cast<int>(Space::kScratch)]) {
        scratch_offsets_[device].push_back(offset);
        offset += (size * program_.item_size + kAlignment - 1) / kAlignment * kAlignment;
      }
      scratch_bytes_.push_back(offset);
    }
  }

  static bool IsContiguous(const Move& move, const Slice& slice) {
    return move.rank == 0 || (move.rank == 1 && slice.strides[0] == 1);
  }

  int32_t NumberIndex(const int64_t* number) const { return static_cast<int32_t>(number - program_.encoding.data()); }

  void AddMove(const Move& move) {
    const bool contiguous = move.monoid == Monoid::kCopy && IsContiguous(move, move.destination) &&
                            IsContiguous(move, move.sources.front());
    moves_.push_back({static_cast<int32_t>(move.monoid), move.rank, Count(move.sources), Count(slices_), move.elements,
                      NumberIndex(move.extents), contiguous});
    AddSlice(move.destination);
    for (const Slice& source : move.sources) AddSlice(source);
  }

  void AddSlice(const Slice& slice) {
    int64_t offset = slice.offset * program_.item_size;
    if (slice.space == Space::kScratch) offset += scratch_offsets_[slice.device][slice.buffer];
    const int32_t slot = slice.space == Space::kScratch ? FlatAddress::kScratch : slice.slot;
    slices_.push_back({{slice.device, slot, offset}, NumberIndex(slice.strides), 0});
  }

  void AddRank(int32_t r) {
    FlatRank rank = {};
    rank.phases.begin = Count(phases_);
    if (plan_.participates[r]) AddPhases(r);
    rank.phases.end = Count(phases_);
    rank.end_waits = AddWaits(r, kEnd);
    rank.listeners.begin = Count(peers_);
    for (const Row& row : Select(plan_.listeners, r)) peers_.push_back(static_cast<int32_t>(row[1]));
    rank.listeners.end = Count(peers_);
    rank.scratch_bytes = scratch_bytes_[r];
    header_.scratch_bytes += rank.scratch_bytes;
    rank.bytes_received = plan_.bytes_received[r];
    header_.num_participants += plan_.participates[r];
    ranks_.push_back(rank);
  }

  // The arrival, then the rounds in which the rank executes moves. What it publishes after one holds until the next.
  void AddPhases(int32_t r) {
    std::span<const Row> left = Select(plan_.moves, r);
    AddPhase(r, kStaging, left);
    while (!left.empty()) {
      const int64_t round = left.front()[1];
      phases_.back().step = static_cast<int32_t>(1 + round);
      AddPhase(r, round, left);
    }
    phases_.back().step = header_.num_steps;
  }

  // Takes the moves of the round off those that are left.
  void AddPhase(int32_t r, int64_t round, std::span<const Row>& left) {
    FlatPhase phase = {};
    phase.waits = AddWaits(r, round);
    phase.parts.begin = Count(parts_);
    const std::span<const Row> moves = Select(left, r, round);
    AddParts(moves);
    phase.parts.end = Count(parts_);
    phases_.push_back(phase);
    left = left.subspan(moves.size());
  }

  Range AddWaits(int64_t r, int64_t round) {
    const int32_t begin = Count(waits_);
    for (const Row& row : Select(plan_.waits, r, round)) {
      waits_.push_back({static_cast<int32_t>(row[2]), static_cast<int32_t>(row[3])});
    }
    return {begin, Count(waits_)};
  }

  // Parts that read the same memory become neighbours: copied to several ranks, it is found in the cache.
  void AddParts(std::span<const Row> moves) {
    Relation places;  // space, device, buffer and first element that a part reads, number of the part
    std::vector<FlatPart> parts;
    for (const Row& row : moves) {
      const Move& move = program_.moves[row[2]];
      const Slice& source = move.sources.front();
      const int64_t size = PartSize(move);
      for (int64_t begin = 0; begin < move.elements; begin += size) {
        places.push_back({static_cast<int64_t>(source.space), source.device, source.buffer, source.offset + begin,
                          Count(parts)});
        parts.push_back(MakePart(static_cast<int32_t>(row[2]), begin, std::min(begin + size, move.elements)));
      }
    }
    Sort(places);
    for (const Row& place : places) parts_.push_back(parts[place[4]]);
  }

  int64_t PartSize(const Move& move) const {
    const int64_t inner = move.rank == 0 ? 1 : move.extents[move.rank - 1];
    const int64_t size = std::max<int64_t>({1, part_bytes_ / ElementTraffic(program_, move),
                                            (move.elements + parts_per_move_ - 1) / parts_per_move_});
    return size > inner ? size / inner * inner : size;  // whole rows
  }

  FlatPart MakePart(int32_t number, int64_t begin, int64_t end) const {
    FlatPart part = {number, 0, begin, end, 0, {}, {}};
    const FlatMove& move = moves_[number];
    if (!move.contiguous) return part;
    part.bytes = (end - begin) * program_.item_size;
    part.destination = slices_[move.slices];
    part.source = slices_[move.slices + 1];
    part.destination.offset += begin * program_.item_size;
    part.source.offset += begin * program_.item_size;
    return part;
  }

  const Program& program_;
  const Planner plan_;
  const int64_t part_bytes_;
  const int64_t parts_per_move_;
  ScheduleHeader header_ = {};
  std::vector<FlatRank> ranks_;
  std::vector<FlatPhase> phases_;
  std::vector<FlatWait> waits_;
  std::vector<int32_t> peers_;
  std::vector<FlatPart> parts_;
  std::vector<FlatMove> moves_;
  std::vector<FlatSlice> slices_;
  std::vector<std::vector<int64_t>> scratch_offsets_;  // by device and buffer
  std::vector<int64_t> scratch_bytes_;                 // by device
};

}  // namespace

Schedule::Schedule(const Program& program, const ScheduleOptions& options) {
  auto [block, size] = Writer(program, options).Pack();
  block_ = std::move(block);
  size_ = size;
}

}  // namespace einsummable
