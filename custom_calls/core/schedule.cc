#include "core/schedule.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace einsummable {
namespace {

inline constexpr int64_t kAlignment = 64;
// Bound the memory that a schedule takes whatever sizes its program claims.
inline constexpr int64_t kMaxPartsPerMove = 4096;
inline constexpr int64_t kMaxParts = 1 << 20;
// Writes to one buffer that are looked at for one that overlaps a read, before the latest is taken for one.
inline constexpr int kMaxScan = 64;
// The round of moves that come before the arrival.
inline constexpr int32_t kStaging = -1;

// The step that a rank has published when it is done with a move of `round`.
int32_t StepAfter(int32_t round) { return round + 2; }

using Buffer = std::tuple<int32_t, Space, int32_t>;

Buffer BufferOf(const Slice& slice) { return {slice.device, slice.space, slice.buffer}; }

// The elements of a buffer that a slice may touch: from its first to its last.
struct Extent {
  int64_t first, last;

  Extent(const Move& move, const Slice& slice) : first(slice.offset), last(slice.offset) {
    for (int32_t dim = 0; dim < move.rank; ++dim) last += (move.extents[dim] - 1) * slice.strides[dim];
  }

  bool Overlaps(const Extent& other) const { return first <= other.last && other.first <= last; }
};

// What a rank waits for before one of its phases, or before it ends.
struct Waits {
  std::map<int32_t, int32_t> steps;  // peer -> step of this call
  std::set<int32_t> earlier;         // peers that must have arrived in the call before this one

  void Add(int32_t peer, int32_t step) {
    int32_t& known = steps[peer];
    known = std::max(known, step);
  }
};

struct RankPlan {
  bool participates = false;
  std::map<int32_t, std::vector<int32_t>> moves;  // round -> moves that it executes
  std::map<int32_t, Waits> waits;                 // by round
  Waits end;
  std::set<int32_t> listeners;
  int64_t bytes_received = 0;
};

// The moves with their executors, and what follows for each rank.
class Planner {
 public:
  Planner(const Program& program, Copies copies) : program_(program), ranks_(program.num_devices) {
    for (const Move& move : program.moves) {
      const bool push = copies == Copies::kPush && move.monoid == Monoid::kCopy;
      executors_.push_back(push ? move.sources.front().device : move.destination.device);
      rounds_.push_back(IsStaging(move) ? kStaging : move.round);
    }
    AssignMoves();
    RecordAccesses();
    for (size_t i = 0; i < program.moves.size(); ++i) AddWaits(i);
    for (RankPlan& rank : ranks_) DropMet(rank);
    for (int32_t r = 0; r < program.num_devices; ++r) AddListeners(r);
  }

  const RankPlan& rank(int32_t r) const { return ranks_[r]; }

 private:
  struct Write {
    int32_t round;
    Extent extent;
  };

  // Copies of a rank's own inputs into its own scratch memory concern no other rank before it has arrived.
  static bool IsStaging(const Move& move) {
    const int32_t device = move.destination.device;
    return move.destination.space == Space::kScratch &&
           std::all_of(move.sources.begin(), move.sources.end(), [&](const Slice& source) {
             return source.device == device && source.space == Space::kInput;
           });
  }

  void AssignMoves() {
    for (size_t i = 0; i < program_.moves.size(); ++i) {
      const Move& move = program_.moves[i];
      ranks_[executors_[i]].moves[rounds_[i]].push_back(static_cast<int32_t>(i));
      RankPlan& receiver = ranks_[move.destination.device];
      // Wraps for sizes that no machine has.
      receiver.bytes_received += static_cast<int64_t>(static_cast<uint64_t>(move.remote_sources) *
                                                      static_cast<uint64_t>(move.elements * program_.item_size));
      receiver.participates = true;
      for (const Slice& source : move.sources) ranks_[source.device].participates = true;
    }
  }

  void RecordAccesses() {
    std::vector<int32_t> order(program_.moves.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rounds_[a] < rounds_[b]; });
    for (int32_t i : order) {
      const Move& move = program_.moves[i];
      writes_[BufferOf(move.destination)][executors_[i]].push_back({rounds_[i], Extent(move, move.destination)});
      for (const Slice& source : move.sources) {
        if (source.space == Space::kScratch) scratch_readers_[BufferOf(source)].insert(executors_[i]);
      }
    }
  }

  void AddWaits(size_t number) {
    const Move& move = program_.moves[number];
    const int32_t executor = executors_[number];
    Waits& waits = ranks_[executor].waits[rounds_[number]];
    AddUse(number, move.destination, waits);
    for (const Slice& source : move.sources) {
      AddUse(number, source, waits);
      if (source.space == Space::kInput) continue;
      for (const auto& [writer, writes] : writes_[BufferOf(source)]) {
        if (writer != executor) AddDependence(rounds_[number], Extent(move, source), writer, writes, waits);
      }
    }
    if (move.destination.space != Space::kScratch) return;
    for (int32_t reader : scratch_readers_[BufferOf(move.destination)]) {
      if (reader != executor) waits.earlier.insert(reader);
    }
  }

  // Another rank's input or output is there once that rank has arrived, and until this move is done.
  void AddUse(size_t number, const Slice& slice, Waits& waits) {
    const int32_t executor = executors_[number];
    if (slice.space == Space::kScratch || slice.device == executor) return;
    waits.Add(slice.device, 1);
    ranks_[slice.device].end.Add(executor, StepAfter(rounds_[number]));
  }

  // The latest write of an earlier round that the read overlaps.
  static void AddDependence(int32_t round, const Extent& read, int32_t writer, const std::vector<Write>& writes,
                            Waits& waits) {
    auto write = std::lower_bound(writes.begin(), writes.end(), round,
                                  [](const Write& w, int32_t value) { return w.round < value; });
    for (int scanned = 0; write != writes.begin(); ++scanned) {
      --write;
      if (!write->extent.Overlaps(read) && scanned < kMaxScan) continue;
      waits.Add(writer, StepAfter(write->round));
      return;
    }
  }

  // Leaves out what an earlier phase has waited for, and of the waits for the call before all that are met because this
  // rank waited for more in that call.
  static void DropMet(RankPlan& rank) {
    std::map<int32_t, int32_t> met;
    auto drop = [&](Waits& waits) {
      std::erase_if(waits.steps, [&](const auto& wait) {
        int32_t& step = met[wait.first];
        if (step >= wait.second) return true;
        step = wait.second;
        return false;
      });
    };
    for (auto& [round, waits] : rank.waits) drop(waits);
    drop(rank.end);
    for (auto& [round, waits] : rank.waits) {
      std::erase_if(waits.earlier, [&](int32_t peer) { return met.contains(peer); });
    }
  }

  void AddListeners(int32_t r) {
    auto listen = [&](const Waits& waits) {
      for (const auto& [peer, step] : waits.steps) ranks_[peer].listeners.insert(r);
      for (int32_t peer : waits.earlier) ranks_[peer].listeners.insert(r);
    };
    for (const auto& [round, waits] : ranks_[r].waits) listen(waits);
    listen(ranks_[r].end);
  }

  const Program& program_;
  std::vector<int32_t> executors_, rounds_;  // by move
  // For each buffer and rank that writes it: its writes in the order of rounds.
  std::map<Buffer, std::map<int32_t, std::vector<Write>>> writes_;
  std::map<Buffer, std::set<int32_t>> scratch_readers_;
  std::vector<RankPlan> ranks_;
};

// The arrays of the schedule while they grow.
class Writer {
 public:
  Writer(const Program& program, const ScheduleOptions& options)
      : program_(program), part_bytes_(options.part_bytes),
        parts_per_move_(std::max<int64_t>(
            1, std::min<int64_t>(kMaxPartsPerMove,
                                 kMaxParts / std::max<int64_t>(1, static_cast<int64_t>(program.moves.size()))))) {
    header_.item_size = program.item_size;
    header_.dtype = static_cast<int32_t>(program.dtype);
    header_.num_ranks = program.num_devices;
    header_.num_steps = program.num_rounds + 1;
    PlaceScratch();
    for (const Move& move : program.moves) AddMove(move);
    const Planner planner(program, options.copies);
    for (int32_t r = 0; r < program.num_devices; ++r) AddRank(r, planner.rank(r));
  }

  std::pair<std::unique_ptr<char[]>, size_t> Pack() {
    const std::vector<int64_t> numbers(program_.encoding);
    int64_t size = Padded(sizeof(ScheduleHeader));
    auto reserve = [&](const auto& array) { return std::exchange(size, size + Padded(Bytes(array))); };
    header_.ranks = reserve(ranks_);
    header_.phases = reserve(phases_);
    header_.waits = reserve(waits_);
    header_.peers = reserve(peers_);
    header_.parts = reserve(parts_);
    header_.moves = reserve(moves_);
    header_.slices = reserve(slices_);
    header_.numbers = reserve(numbers);
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
    copy(header_.numbers, numbers);
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
    moves_.push_back({static_cast<int32_t>(move.monoid), move.rank, static_cast<int32_t>(move.sources.size()),
                      Count(slices_), move.elements, NumberIndex(move.extents), contiguous});
    AddSlice(move.destination);
    for (const Slice& source : move.sources) AddSlice(source);
    header_.traffic_bytes += static_cast<double>(move.elements) * static_cast<double>(ElementTraffic(move));
  }

  void AddSlice(const Slice& slice) {
    int64_t offset = slice.offset * program_.item_size;
    if (slice.space == Space::kScratch) offset += scratch_offsets_[slice.device][slice.buffer];
    const int32_t slot = slice.space == Space::kScratch ? FlatSlice::kScratch : slice.slot;
    slices_.push_back({{slice.device, slot, offset}, NumberIndex(slice.strides), 0});
  }

  int64_t ElementTraffic(const Move& move) const {
    return program_.item_size * static_cast<int64_t>(1 + move.sources.size());
  }

  void AddRank(int32_t r, const RankPlan& plan) {
    FlatRank rank = {};
    rank.phases.begin = Count(phases_);
    if (plan.participates) AddPhases(plan);
    rank.phases.end = Count(phases_);
    rank.end_waits = AddWaits(plan.end);
    rank.listeners.begin = Count(peers_);
    peers_.insert(peers_.end(), plan.listeners.begin(), plan.listeners.end());
    rank.listeners.end = Count(peers_);
    rank.scratch_bytes = scratch_bytes_[r];
    rank.bytes_received = plan.bytes_received;
    header_.num_participants += plan.participates;
    ranks_.push_back(rank);
  }

  // The arrival, then the rounds in which the rank executes moves. What it publishes after one holds until the next.
  void AddPhases(const RankPlan& plan) {
    AddPhase(plan, kStaging);
    for (const auto& [round, moves] : plan.moves) {
      if (round == kStaging) continue;
      phases_.back().step = 1 + round;
      AddPhase(plan, round);
    }
    phases_.back().step = header_.num_steps;
  }

  void AddPhase(const RankPlan& plan, int32_t round) {
    const auto waits = plan.waits.find(round);
    const auto moves = plan.moves.find(round);
    FlatPhase phase = {};
    phase.waits = AddWaits(waits == plan.waits.end() ? Waits() : waits->second);
    phase.parts.begin = Count(parts_);
    if (moves != plan.moves.end()) AddParts(moves->second);
    phase.parts.end = Count(parts_);
    phases_.push_back(phase);
  }

  Range AddWaits(const Waits& waits) {
    const int32_t begin = Count(waits_);
    const int32_t earlier = 1 - (kSlots - 1) * header_.num_steps;  // the arrival in the call before
    for (int32_t peer : waits.earlier) waits_.push_back({peer, earlier});
    for (const auto& [peer, step] : waits.steps) waits_.push_back({peer, step});
    return {begin, Count(waits_)};
  }

  // Parts that read the same memory become neighbours: copied to several ranks, it is found in the cache.
  void AddParts(const std::vector<int32_t>& moves) {
    const size_t first = parts_.size();
    for (int32_t number : moves) {
      const Move& move = program_.moves[number];
      const int64_t inner = move.rank == 0 ? 1 : move.extents[move.rank - 1];
      int64_t size = std::max<int64_t>({1, part_bytes_ / ElementTraffic(move),
                                        (move.elements + parts_per_move_ - 1) / parts_per_move_});
      if (size > inner) size = size / inner * inner;  // whole rows
      for (int64_t begin = 0; begin < move.elements; begin += size) {
        parts_.push_back(MakePart(number, begin, std::min(begin + size, move.elements)));
      }
    }
    auto position = [&](const FlatPart& part) {
      const Slice& source = program_.moves[part.move].sources.front();
      return std::make_tuple(source.space, source.device, source.buffer, source.offset + part.begin);
    };
    std::stable_sort(parts_.begin() + static_cast<std::ptrdiff_t>(first), parts_.end(),
                     [&](const FlatPart& a, const FlatPart& b) { return position(a) < position(b); });
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
  std::tie(block_, size_) = Writer(program, options).Pack();
}

}  // namespace einsummable
