// The interpreter of exchange programs: what one rank does in one call. Every engine runs this code; how memory is
// read, written and waited for, in which they differ, is the template argument `Memory`.
//
// Terms. A *call* is one execution of the exchange; calls of one schedule are numbered 0, 1, ... by their *epoch*. A
// *rank* is run by a team of one or more *workers* (CUDA: thread blocks; CPU: tasks that the library's threads take
// up), and a worker by one or more *lanes* (CUDA: the threads of the block; CPU: one). Each move has one rank that
// executes it: that of the destination (it pulls) or of the source (it pushes); the schedule says which.
//
// Protocol. A rank publishes its progress to the ranks that wait for it (its listeners), as a number that only grows:
//
//   stamp(epoch, step) = epoch * num_steps + step,   step 1: it has arrived; step 1 + k: it is done with rounds < k;
//                                                    step num_steps: it is done with all rounds.
//
// A waiter compares with >=, so it does not matter how far ahead the other one is, nothing is ever reset, and a
// captured CUDA graph can be replayed: the epoch is derived from the team's count, which lives beside the flags. In
// each call a rank goes through:
//
//   1. Arrival. It does what concerns no other rank (copies of its inputs to its scratch memory), announces the
//      addresses of its inputs and outputs, and publishes step 1: the start barrier.
//   2. Rounds. For each in which it executes moves: wait for the ranks that these moves depend on, run them, publish.
//      What a move depends on, by rank p:
//        - it reads or writes an input or output of p:         p has arrived;
//        - it reads what p wrote in round j (of any buffer):   p has done round j;
//        - it writes scratch memory that p read in call e - 2: p has arrived in call e - 1.
//      So a rank waits for no others than it needs, and the rounds are no barriers.
//   3. End. Wait for every rank whose moves read or write inputs or outputs of this one, until it has done the last of
//      them: then the caller may use the outputs, and free or overwrite the inputs: the end barrier.
//
// Scratch memory is not covered by the end barrier. There are two copies of it that take turns, and the third kind of
// dependence keeps a rank from writing the copy that others still read: it looks two calls back, and so is met already
// when the ranks are less than a call apart. With one copy, what is done before the arrival would have to wait for the
// slowest reader of the call before.
//
// Memory order. Publishing is a release, waiting an acquire. A team counts the workers that are done with a phase by
// acquire-release additions, and the last one publishes; so what any worker wrote before it counted is visible to
// whoever sees the stamp. The waits of a phase are made by every worker itself, and every phase begins by waiting for
// the count, which orders it after all of the team's earlier phases.
//
// Failure. No wait is endless: `Memory::Pause` decides how long, then marks the rank as failed. A failed rank moves
// nothing more and publishes kPoison, which is larger than any stamp: whoever waits for it sees that and fails too
// instead of waiting for its own time to run out. (A worker that publishes a stamp just then may overwrite it; the
// listener's own time bounds its wait then.) Failure is sticky: the flags are of no use until they are made anew.
//
// Contract. Calls of one rank do not overlap: no worker of it begins call e + 1 before all have ended call e. A rank
// has the same number of workers in all calls. All flags and counts begin as 0.
//
// The checks of this code are in `checks/`: all interleavings of small programs under a weak memory model, mutants
// included, and real threads under ThreadSanitizer.
//
// `Memory` is one lane's view of one rank. It has:
//
//   int32_t Lane() const, Lanes() const
//       Number of this lane in its worker, and how many there are.
//   bool All(bool x)
//       Barrier of the worker's lanes; whether x was true in all of them.
//   uint64_t Count()
//       The team's count, acquire.
//   uint64_t AddToCount()
//       Adds 1, acquire-release; the count with it. Called by lane 0.
//   uint64_t Progress(int32_t peer)
//       What `peer` has last published to this rank, acquire.
//   void Publish(int32_t listener, uint64_t stamp)
//       Stores, release, what `Progress` of this rank is to say to `listener`.
//   bool Pause(int32_t peer, uint64_t stamp, uint64_t polls)
//       Called after each fruitless look at `peer` (at the team's count if it is this rank): true to look again, false
//       to give up, be it for good (after `Fail`, or because another worker of the rank has failed) or because this
//       memory does not wait at all: then the worker is blocked until it is advanced again.
//   void Fail(int32_t peer, uint64_t stamp)
//       Marks the rank as failed, for good, in waiting for `stamp` of `peer`.
//   bool Failed()
//       Whether a worker of the rank has failed.
//   void Announce(uint64_t epoch)
//       Makes the addresses of this rank's inputs and outputs known to its listeners; called by all lanes of worker 0
//       before step 1 is published.
//   void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t epoch)
//       Copies or aggregates one part, all lanes together.
#pragma once

#include <cstdint>

#include "core/schedule_view.h"

namespace einsummable {

// Published by a rank that has failed. Stamps stay below it.
inline constexpr uint64_t kPoison = uint64_t{1} << 63;

enum class Outcome {
  kDone,
  kBlocked,  // only with a memory that does not wait: to be advanced again once other ranks have got further
  kFailed,
};

// One worker's way through one call of one rank.
template <typename Memory>
class Worker {
 public:
  // For a rank that takes part in the schedule (it has phases).
  EINSUMMABLE_HD Worker(const ScheduleView& schedule, int32_t rank, int32_t worker, int32_t num_workers)
      : schedule_(schedule), rank_(rank), worker_(worker), num_workers_(num_workers) {}

  // Goes on until the call is done, or it has to wait and the memory does not; or until it would begin a round from
  // `end_round` on, as if it had to wait.
  EINSUMMABLE_HD Outcome Advance(Memory& memory, int32_t end_round = INT32_MAX) {
    const FlatRank& rank = schedule_.rank(rank_);
    if (!begun_) {
      epoch_ = memory.Count() / CountsPerCall();
      first_stamp_ = Stamp(epoch_, 0);
      begun_ = true;
    }
    for (; phase_ < rank.phases.size(); ++phase_) {
      if (next_round_ >= end_round) return Outcome::kBlocked;
      const FlatPhase& phase = schedule_.phase(rank.phases.begin + phase_);
      if (!WaitForTeam(memory) || !WaitFor(memory, phase.waits)) return Stop(memory);
      RunParts(memory, phase.parts);
      if (phase_ == 0 && worker_ == 0) memory.Announce(epoch_);
      Finish(memory, phase.step);
      next_round_ = phase.step - 1;
    }
    if (!WaitFor(memory, rank.end_waits)) return Stop(memory);
    return Outcome::kDone;
  }

  // How many phases it is done with in this call.
  EINSUMMABLE_HD int32_t phase() const { return phase_; }

 private:
  EINSUMMABLE_HD uint64_t CountsPerCall() const {
    return static_cast<uint64_t>(schedule_.rank(rank_).phases.size()) * static_cast<uint64_t>(num_workers_);
  }

  // What the team's count is when all workers are done with the first `phases` phases of this call.
  EINSUMMABLE_HD uint64_t CountAfter(int32_t phases) const {
    return epoch_ * CountsPerCall() + static_cast<uint64_t>(phases) * static_cast<uint64_t>(num_workers_);
  }

  EINSUMMABLE_HD uint64_t Stamp(uint64_t epoch, int32_t step) const {
    return epoch * static_cast<uint64_t>(schedule_.header().num_steps) + static_cast<uint64_t>(step);
  }

  EINSUMMABLE_HD bool WaitForTeam(Memory& memory) {
    if (num_workers_ == 1) return memory.All(!memory.Failed());
    const uint64_t count = CountAfter(phase_);
    bool ok = true;
    for (uint64_t polls = 0; memory.Lane() == 0 && ok && memory.Count() < count; ++polls) {
      ok = memory.Pause(rank_, count, polls);
    }
    return memory.All(ok && !memory.Failed());
  }

  // The lanes share the peers among them; what one of them has acquired, all have after `All`. A worker that was blocked
  // goes on with the peer that it was blocked by.
  EINSUMMABLE_HD bool WaitFor(Memory& memory, Range waits) {
    const FlatWait* const all = &schedule_.wait(waits.begin);
    const int32_t count = waits.size(), lanes = memory.Lanes();
    int32_t next = waited_ + memory.Lane();
    while (next < count && WaitForPeer(memory, all[next])) next += lanes;
    const bool ok = memory.All(next >= count);
    waited_ = ok ? 0 : next - memory.Lane();
    return ok;
  }

  EINSUMMABLE_HD bool WaitForPeer(Memory& memory, const FlatWait& wait) {
    const int64_t stamp = static_cast<int64_t>(first_stamp_) + wait.step;  // negative in calls that have none before
    for (uint64_t polls = 0;; ++polls) {
      const uint64_t progress = memory.Progress(wait.peer);
      if (static_cast<int64_t>(progress) >= stamp) return true;  // kPoison is negative here
      if (progress >= kPoison) {
        memory.Fail(wait.peer, static_cast<uint64_t>(stamp));
        return false;
      }
      if (!memory.Pause(wait.peer, static_cast<uint64_t>(stamp), polls)) return false;
    }
  }

  // The parts of a phase are split evenly among the workers; neighbours, which may read the same memory, stay together.
  EINSUMMABLE_HD void RunParts(Memory& memory, Range parts) {
    const FlatPart* const all = &schedule_.part(parts.begin);
    const int64_t count = parts.size();
    const int64_t end = count * (worker_ + 1) / num_workers_;
    for (int64_t i = count * worker_ / num_workers_; i < end; ++i) memory.Run(schedule_, all[i], epoch_);
  }

  // Counts this worker; the last of the team publishes.
  EINSUMMABLE_HD void Finish(Memory& memory, int32_t step) {
    memory.All(true);  // what all lanes have done comes before the count
    const bool last = memory.Lane() != 0 || memory.AddToCount() == CountAfter(phase_ + 1);
    if (memory.All(last)) PublishToAll(memory, first_stamp_ + static_cast<uint64_t>(step));
  }

  EINSUMMABLE_HD void PublishToAll(Memory& memory, uint64_t stamp) {
    const Range listeners = schedule_.rank(rank_).listeners;
    const int32_t* const all = &schedule_.peer(listeners.begin);
    const int32_t count = listeners.size(), lanes = memory.Lanes();
    for (int32_t i = memory.Lane(); i < count; i += lanes) memory.Publish(all[i], stamp);
  }

  EINSUMMABLE_HD Outcome Stop(Memory& memory) {
    const bool failed = !memory.All(!memory.Failed());
    if (!failed) return Outcome::kBlocked;
    PublishToAll(memory, kPoison);
    return Outcome::kFailed;
  }

  ScheduleView schedule_;
  int32_t rank_, worker_, num_workers_;
  int32_t phase_ = 0;
  int32_t next_round_ = -1;  // that of the phase; the arrival comes before round 0
  int32_t waited_ = 0;  // waits of the phase that this lane and those beside it have met
  bool begun_ = false;
  uint64_t epoch_ = 0;
  uint64_t first_stamp_ = 0;  // that of step 0 of this call
};

}  // namespace einsummable
