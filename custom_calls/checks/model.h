// Enumerates all executions of the interpreter on a small exchange program, under a weak memory model
// (`weak_memory.h`).
//
// Every worker is a thread that makes several calls. Before a call the caller writes new inputs, after it the outputs
// are compared with what they should be and overwritten. A step of a thread is one operation on an atomic and all
// accesses to plain memory up to the next. Steps interleave in every way that matters, and every value that a load may
// see is tried: a store is done as soon as its thread comes to it, since whoever reads later may still see the value
// before it, and the order of accesses to plain memory follows from what was acquired, not from when they are explored.
// States that have been seen are not explored again. To find its next operation, a thread is replayed from the
// beginning of its call with the results that its operations had.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checks/programs.h"
#include "checks/weak_memory.h"
#include "core/interpreter.h"
#include "core/schedule.h"

namespace einsummable::checks {

// Where a mutant departs from the protocol.
struct Mutation {
  bool relaxed_publish = false, relaxed_wait = false, relaxed_count = false;
  bool early_publish = false;  // one step too far
  bool single_slot = false;
  // Waits that are left out: for arrivals; for rounds; for the readers of the scratch memory two calls ago; at the end.
  bool no_start_waits = false, no_round_waits = false, no_slot_waits = false, no_end_waits = false;
};

struct Model {
  std::string name;
  ProgramBuilder program;
  int calls;
  Copies copies = Copies::kPull;
  int workers = 1;
  bool missing_rank = false;  // the last rank never calls, and the others lose patience at any time
  // Try only the oldest of the values with which a load could end its wait. What a thread learns from a later one
  // includes what it learns from the oldest, so whatever can go wrong after the later one can after the oldest.
  bool oldest_only = false;

  Model(std::string name, ProgramBuilder program, int calls)
      : name(std::move(name)), program(std::move(program)), calls(calls) {}
};

// The schedule of a model, with the waits that the mutation leaves out made to look at calls that have never been.
std::vector<char> MutatedBlock(const Schedule& schedule, const Mutation& mutation) {
  std::vector<char> block(schedule.data(), schedule.data() + schedule.size());
  const ScheduleView view(block.data());
  auto* waits = reinterpret_cast<FlatWait*>(block.data() + view.header().waits);
  auto drop = [&](Range range, auto&& chosen) {
    for (int32_t i = range.begin; i < range.end; ++i) {
      if (chosen(waits[i])) waits[i].step = INT32_MIN;
    }
  };
  for (int32_t r = 0; r < view.header().num_ranks; ++r) {
    for (int32_t p = view.rank(r).phases.begin; p < view.rank(r).phases.end; ++p) {
      drop(view.phase(p).waits, [&](const FlatWait& wait) {
        return wait.step < 1   ? mutation.no_slot_waits
               : wait.step > 1 ? mutation.no_round_waits
                               : mutation.no_start_waits;
      });
    }
    drop(view.rank(r).end_waits, [&](const FlatWait&) { return mutation.no_end_waits; });
  }
  return block;
}

// Numbers for everything that the threads of a model share.
class Layout {
 public:
  Layout(const Model& model, const Program& program)
      : ranks_(program.num_devices), workers_(model.workers) {
    for (int space = 0; space < kNumSpaces; ++space) {
      const auto& sizes = program.sizes[0][space];
      sizes_[space] = sizes.empty() ? 0 : static_cast<int>(sizes[0]);
    }
  }

  int num_ranks() const { return ranks_; }
  int num_threads() const { return ranks_ * workers_; }
  int RankOf(int thread) const { return thread / workers_; }
  int WorkerOf(int thread) const { return thread % workers_; }

  int num_atomics() const { return ranks_ * (ranks_ + 2); }
  int Flag(int reader, int writer) const { return reader * ranks_ + writer; }
  int Count(int rank) const { return ranks_ * ranks_ + rank; }
  int Stream(int rank) const { return ranks_ * (ranks_ + 1) + rank; }

  int num_cells() const { return ranks_ * PerRank() + ranks_ * ranks_; }
  int size(Space space) const { return sizes_[static_cast<int>(space)]; }
  int Cell(int rank, Space space, int copy, int64_t element) const {
    const int input = size(Space::kInput), output = size(Space::kOutput), scratch = size(Space::kScratch);
    const int first = space == Space::kInput ? 0 : space == Space::kOutput ? input : input + output + copy * scratch;
    return rank * PerRank() + first + static_cast<int>(element);
  }
  // Where `reader` finds the addresses of `owner`'s buffers.
  int Address(int reader, int owner) const { return ranks_ * PerRank() + reader * ranks_ + owner; }

 private:
  int PerRank() const { return sizes_[0] + sizes_[1] + kSlots * sizes_[2]; }

  int ranks_, workers_;
  std::array<int, kNumSpaces> sizes_;
};

inline uint64_t InputAt(int call, int rank, int64_t element) { return 1000 * (call + 1) + 100 * rank + element; }

// What each rank's output should hold after a call; 0 where nothing is written.
inline std::vector<std::vector<uint64_t>> Outputs(const Program& program, const Layout& layout, int call) {
  std::vector<std::array<std::vector<uint64_t>, kNumSpaces>> buffers(layout.num_ranks());
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    for (int space = 0; space < kNumSpaces; ++space) {
      buffers[rank][space].resize(static_cast<size_t>(layout.size(static_cast<Space>(space))));
    }
    for (size_t i = 0; i < buffers[rank][0].size(); ++i) buffers[rank][0][i] = InputAt(call, rank, i);
  }
  auto at = [&](const Slice& slice, int64_t i) -> uint64_t& {
    return buffers[slice.device][static_cast<int>(slice.space)][slice.offset + i];
  };
  for (const Move& move : program.moves) {
    for (int64_t i = 0; i < move.elements; ++i) {
      uint64_t sum = 0;
      for (const Slice& source : move.sources) sum += at(source, i);
      at(move.destination, i) = sum;
    }
  }
  std::vector<std::vector<uint64_t>> outputs;
  for (auto& spaces : buffers) outputs.push_back(spaces[static_cast<int>(Space::kOutput)]);
  return outputs;
}

struct Thread {
  std::vector<uint64_t> log;  // results of its operations in this call
  int call = 0;
  bool failed = false;
  bool at_choice = false;  // whether its next operation depends on what other threads do meanwhile
};

struct State {
  WeakMemory memory;
  std::vector<Thread> threads;
};

// Thrown where a thread comes to the operation after the one it was to do.
struct NextStep {
  bool at_choice;
};

// Thrown where it cannot go on before another thread has.
struct Blocked {};

// What one step of a thread may choose.
struct Choice {
  int value = 0;           // which of the values that a load may see
  bool patience = true;    // whether to go on waiting
  int num_values = 1;      // how many there were to choose from
};

// The interpreter's memory in a model. Operations that the log knows are replayed; the next one is done; the one after
// that ends the step. Plain memory is accessed only once the log has been replayed.
class ModelMemory {
 public:
  ModelMemory(const Layout& layout, const Mutation& mutation, State& state, int thread, Choice& choice)
      : layout_(layout), mutation_(mutation), memory_(state.memory), log_(state.threads[thread].log), thread_(thread),
        rank_(layout.RankOf(thread)), choice_(choice) {}

  int32_t Lane() const { return 0; }
  int32_t Lanes() const { return 1; }
  bool All(bool x) { return x; }
  uint64_t Count() { return Load(layout_.Count(rank_), !mutation_.relaxed_count); }
  uint64_t AddToCount() { return Add(layout_.Count(rank_), !mutation_.relaxed_count); }

  uint64_t Progress(int32_t peer) {
    const uint64_t value = Load(layout_.Flag(rank_, peer), !mutation_.relaxed_wait);
    // If the wait is not over the step will not count, so what is replayed need not tell apart what ends it.
    if (value < kPoison) log_[next_ - 1] = kPoison - 1;
    return value;
  }

  void Publish(int32_t listener, uint64_t stamp) {
    if (mutation_.early_publish) ++stamp;
    Do(false, [&] {
      memory_.Store(thread_, layout_.Flag(listener, rank_), stamp, !mutation_.relaxed_publish);
      return 0;
    });
  }

  bool Pause(int32_t, uint64_t, uint64_t) {
    if (next_ < log_.size() && log_[next_] == kGaveUp) {
      ++next_;
    } else {
      if (choice_.patience) throw Blocked();
      log_[next_ - 1] = 0;
      log_.push_back(kGaveUp);
      ++next_;
    }
    failed_ = true;
    return false;
  }

  void Fail(int32_t, uint64_t) { failed_ = true; }
  bool Failed() { return failed_; }

  // Addresses are told by the epoch in which they are right.
  void Announce(uint64_t epoch) {
    for (int reader = 0; reader < layout_.num_ranks(); ++reader) {
      if (reader != rank_) Write(layout_.Address(reader, rank_), epoch + 1, "an address");
    }
  }

  void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t epoch) {
    const FlatMove& move = schedule.move(part.move);
    for (int64_t i = part.begin; i < part.end; ++i) {
      uint64_t sum = 0;
      for (int32_t s = 0; s < move.num_sources; ++s) {
        sum += Read(CellOf(schedule.source(move, s), i, epoch), "a source");
      }
      Write(CellOf(schedule.destination(move), i, epoch), sum, "a destination");
    }
  }

  // ---- What the caller does ---------------------------------------------------------------------------------------

  void Begin() {
    Do(false, [] { return 0; });
  }

  // Calls of one rank follow each other: what a stream does on a device.
  void WaitForStream(uint64_t count) {
    if (Load(layout_.Stream(rank_), true) < count) throw Blocked();
  }
  void AddToStream() { Add(layout_.Stream(rank_), true); }

  uint64_t Read(int cell, const char* name) { return live_ ? memory_.Read(thread_, cell, name) : 0; }
  void Write(int cell, uint64_t value, const char* name) {
    if (live_) memory_.Write(thread_, cell, value, name);
  }
  bool live() const { return live_; }

 private:
  static constexpr uint64_t kGaveUp = ~uint64_t{0};

  template <typename Operation>
  uint64_t Do(bool is_choice, Operation&& operation) {
    if (next_ < log_.size()) return log_[next_++];
    if (live_) throw NextStep{is_choice};
    const uint64_t result = operation();
    memory_.Step(thread_);
    log_.push_back(result);
    ++next_;
    live_ = true;
    return result;
  }

  uint64_t Load(int atomic, bool acquire) {
    return Do(IsShared(atomic), [&] {
      choice_.num_values = memory_.NumReadable(thread_, atomic);
      return memory_.Load(thread_, atomic, choice_.value, acquire);
    });
  }

  uint64_t Add(int atomic, bool ordered) {
    return Do(IsShared(atomic), [&] { return memory_.Add(thread_, atomic, 1, ordered); });
  }

  // A team of one counts for itself.
  bool IsShared(int atomic) const {
    return atomic != layout_.Count(rank_) || layout_.num_threads() > layout_.num_ranks();
  }

  int CellOf(const FlatSlice& slice, int64_t element, uint64_t epoch) {
    const bool scratch = slice.slot == FlatSlice::kScratch;
    if (!scratch && slice.device != rank_) {
      const uint64_t told = Read(layout_.Address(rank_, slice.device), "an address");
      if (live_ && told != epoch + 1) throw Violation("an address of another call is used");
    }
    const Space space = scratch ? Space::kScratch : slice.slot == 0 ? Space::kInput : Space::kOutput;
    const int copy = mutation_.single_slot ? 0 : static_cast<int>(epoch % kSlots);
    return layout_.Cell(slice.device, space, copy, slice.offset / static_cast<int64_t>(sizeof(uint64_t)) + element);
  }

  const Layout& layout_;
  const Mutation& mutation_;
  WeakMemory& memory_;
  std::vector<uint64_t>& log_;
  const int thread_, rank_;
  Choice& choice_;
  size_t next_ = 0;
  bool live_ = false;
  bool failed_ = false;
};

class Checker {
 public:
  Checker(const Model& model, const Mutation& mutation)
      : model_(model), mutation_(mutation), program_(model.program.Build()), layout_(model, *program_),
        block_(MutatedBlock(Schedule(*program_, {model.copies, 1}), mutation)), schedule_(block_.data()) {
    for (int call = 0; call < model.calls; ++call) expected_.push_back(Outputs(*program_, layout_, call));
  }

  // Explores all executions. What is wrong with one of them, if any.
  std::optional<std::string> Run() {
    std::vector<State> open = {
        {WeakMemory(layout_.num_threads(), layout_.num_atomics(), layout_.num_cells()),
         std::vector<Thread>(static_cast<size_t>(layout_.num_threads()))}};
    try {
      while (!open.empty()) {
        const State state = std::move(open.back());
        open.pop_back();
        if (!Expand(state, open)) throw Violation("every thread that has not ended waits for another");
      }
    } catch (const Violation& violation) {
      return violation.what();
    }
    return std::nullopt;
  }

  int64_t num_states() const { return static_cast<int64_t>(seen_.size()); }

 private:
  // Adds the states that follow; false if there is none though some thread has not ended.
  bool Expand(const State& state, std::vector<State>& open) {
    bool all_ended = true, moved = false;
    const int num_threads = layout_.num_threads() - (model_.missing_rank ? model_.workers : 0);
    for (int thread = 0; thread < num_threads; ++thread) {
      const Thread& it = state.threads[thread];
      if (it.failed || it.call == model_.calls) continue;
      if (!it.at_choice) return ExpandThread(state, thread, open);
      all_ended = false;
    }
    for (int thread = 0; thread < num_threads; ++thread) {
      const Thread& it = state.threads[thread];
      if (!it.failed && it.call < model_.calls) moved |= ExpandThread(state, thread, open);
    }
    return moved || all_ended;
  }

  // The same for steps of one thread; false if it can make none.
  bool ExpandThread(const State& state, int thread, std::vector<State>& open) {
    bool moved = false;
    for (int patience = model_.missing_rank ? 0 : 1; patience < 2; ++patience) {
      Choice choice;
      choice.patience = patience == 1;
      for (; choice.value < choice.num_values; ++choice.value) {
        State next = state;
        if (!Step(next, thread, choice)) continue;
        moved = true;
        if (IsNew(next)) open.push_back(std::move(next));
        if (model_.oldest_only) break;
      }
    }
    return moved;
  }

  // False if the thread cannot go on, with this choice.
  bool Step(State& state, int thread, Choice& choice) {
    ModelMemory memory(layout_, mutation_, state, thread, choice);
    Thread& it = state.threads[thread];
    try {
      it.failed = !Call(memory, thread, it.call);
      it.log.clear();
      ++it.call;
      it.at_choice = false;
    } catch (const NextStep& next) {
      it.at_choice = next.at_choice;
    } catch (const Blocked&) {
      return false;
    }
    return true;
  }

  // One call of a worker, with what the caller does before and after. False if it fails.
  bool Call(ModelMemory& memory, int thread, int call) const {
    const uint64_t workers = static_cast<uint64_t>(model_.workers);
    const uint64_t before = static_cast<uint64_t>(call) * (workers + 1);
    const int worker = layout_.WorkerOf(thread);
    memory.Begin();
    if (worker == 0) WriteInputs(memory, thread, call);
    if (workers > 1) {
      if (worker == 0) memory.AddToStream();
      memory.WaitForStream(before + 1);
    }
    Worker<ModelMemory> run(schedule_, layout_.RankOf(thread), worker, model_.workers);
    const Outcome outcome = run.Advance(memory);
    if (outcome == Outcome::kFailed) return false;
    if (model_.missing_rank) throw Violation("a rank ends though another has never called");
    if (workers > 1) {
      memory.AddToStream();
      if (worker == 0) memory.WaitForStream(before + 1 + workers);
    }
    if (worker == 0) TakeOutputs(memory, thread, call);
    return true;
  }

  void WriteInputs(ModelMemory& memory, int thread, int call) const {
    const int rank = layout_.RankOf(thread);
    for (int i = 0; i < layout_.size(Space::kInput); ++i) {
      memory.Write(layout_.Cell(rank, Space::kInput, 0, i), InputAt(call, rank, i), "an input");
    }
  }

  void TakeOutputs(ModelMemory& memory, int thread, int call) const {
    const int rank = layout_.RankOf(thread);
    for (int i = 0; i < layout_.size(Space::kOutput); ++i) {
      const int cell = layout_.Cell(rank, Space::kOutput, 0, i);
      const uint64_t found = memory.Read(cell, "an output");
      if (memory.live() && found != expected_[call][rank][i]) throw Violation("an output is wrong");
      memory.Write(cell, 0, "an output");
    }
  }

  bool IsNew(const State& state) {
    std::string text;
    auto add = [&](const void* data, size_t size) { text.append(static_cast<const char*>(data), size); };
    state.memory.Describe(add);
    for (const Thread& thread : state.threads) {
      const uint64_t numbers[] = {static_cast<uint64_t>(thread.call), thread.failed, thread.log.size()};
      add(numbers, sizeof(numbers));
      add(thread.log.data(), thread.log.size() * sizeof(thread.log[0]));
    }
    // 64 bits of hash and the length: a state is missed with a probability of about 1e-8 in a million states.
    return seen_.insert(std::hash<std::string>()(text) ^ (text.size() << 48)).second;
  }

  const Model& model_;
  const Mutation mutation_;
  const std::unique_ptr<const Program> program_;
  const Layout layout_;
  const std::vector<char> block_;
  const ScheduleView schedule_;
  std::vector<std::vector<std::vector<uint64_t>>> expected_;  // by call, rank and element
  std::unordered_set<uint64_t> seen_;
};

}  // namespace einsummable::checks
