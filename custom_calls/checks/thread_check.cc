// Runs the interpreter and the CPU engine on real threads, to be built with ThreadSanitizer.
//
// First every worker of every rank is a thread that waits: ranks are up to a call apart, and scratch memory is
// double-buffered. Then the engine itself: "devices" that call exchanges one after another, the next from the end of
// the one before, as XLA does; small ones, which one thread runs, and large ones.
// Exit status 1 if a result is wrong (66 if ThreadSanitizer has seen a race).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checks/programs.h"
#include "core/interpreter.h"
#include "core/schedule.h"
#include "cpu/engine.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"

namespace einsummable::cpu {
namespace {

// Copies and sums of numbers without strides: all that the programs here need.
void RunNumbers(const BoundMove& move, int64_t begin, int64_t end, bool) {
  for (int64_t i = begin; i < end; ++i) {
    int64_t sum = 0;
    for (int64_t s = 0; s < move.num_sources; ++s) sum += reinterpret_cast<const int64_t*>(move.sources[s])[i];
    reinterpret_cast<int64_t*>(move.destination)[i] = sum;
  }
}

}  // namespace

// In the place of the kernels, which take long to build and know nothing of threads.
RunFn BestRun() { return RunNumbers; }

}  // namespace einsummable::cpu

namespace einsummable::checks {
namespace {

using cpu::Buffers;
using Numbers = std::vector<int64_t>;
using std::chrono::steady_clock;

// The buffers of one call of all ranks, each with one input and one output.
class Call {
 public:
  Call(const Program& program, int64_t call) {
    for (int64_t rank = 0; rank < program.num_devices; ++rank) {
      Numbers input(static_cast<size_t>(program.sizes[rank][0][0]));
      int64_t next = 1'000'000 * call + 1'000 * rank;
      for (int64_t& element : input) element = next++;
      inputs.push_back(std::move(input));
      outputs.emplace_back(static_cast<size_t>(program.sizes[rank][1][0]), -1);
    }
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      slots_.push_back({reinterpret_cast<char*>(inputs[rank].data()), reinterpret_cast<char*>(outputs[rank].data())});
    }
    for (auto& slots : slots_) buffers.push_back(slots.data());
  }

  std::vector<Numbers> inputs, outputs;
  std::vector<char* const*> buffers;  // by rank, then slot

 private:
  std::vector<std::vector<char*>> slots_;
};

// What the moves do to the outputs, one after another.
std::vector<Numbers> Expected(const Program& program, int64_t call) {
  Call all(program, call);
  std::vector<Numbers> scratch;
  for (auto& sizes : program.sizes) scratch.emplace_back(sizes[2].empty() ? 0 : static_cast<size_t>(sizes[2][0]));
  auto at = [&](const Slice& slice, int64_t i) -> int64_t& {
    auto& buffer = slice.space == Space::kInput    ? all.inputs[slice.device]
                   : slice.space == Space::kOutput ? all.outputs[slice.device]
                                                   : scratch[slice.device];
    return buffer[slice.offset + i];
  };
  for (const Move& move : program.moves) {
    for (int64_t i = 0; i < move.elements; ++i) {
      int64_t sum = 0;
      for (const Slice& source : move.sources) sum += at(source, i);
      at(move.destination, i) = sum;
    }
  }
  return all.outputs;
}

// ---- Threads that wait --------------------------------------------------------------------------------------------

constexpr int kMaxRanks = 8;

struct Shared {
  std::atomic<uint64_t> flags[kMaxRanks][kMaxRanks] = {};  // by reader and writer
  std::atomic<uint64_t> counts[kMaxRanks] = {};
  std::atomic<bool> failed[kMaxRanks] = {};
  std::vector<char* const*> addresses[kMaxRanks] = {};  // of all ranks' buffers, as each rank has been told
  std::vector<Numbers> scratch[kSlots];                 // by copy and rank
  std::chrono::milliseconds patience{60'000};
};

class WaitingMemory {
 public:
  WaitingMemory(Shared& shared, int32_t rank, int32_t num_ranks, char* const* own)
      : shared_(shared), rank_(rank), num_ranks_(num_ranks), own_(own) {}

  int32_t Lane() const { return 0; }
  int32_t Lanes() const { return 1; }
  bool All(bool x) { return x; }
  uint64_t Count() { return shared_.counts[rank_].load(std::memory_order_acquire); }
  uint64_t AddToCount() { return shared_.counts[rank_].fetch_add(1, std::memory_order_acq_rel) + 1; }
  uint64_t Progress(int32_t peer) { return shared_.flags[rank_][peer].load(std::memory_order_acquire); }
  void Publish(int32_t listener, uint64_t stamp) {
    shared_.flags[listener][rank_].store(stamp, std::memory_order_release);
  }
  bool Pause(int32_t peer, uint64_t stamp, uint64_t polls) {
    if (polls == 0) begin_ = steady_clock::now();
    if (Failed()) return false;
    if (steady_clock::now() - begin_ > shared_.patience) {
      Fail(peer, stamp);
      return false;
    }
    std::this_thread::yield();
    return true;
  }
  void Fail(int32_t, uint64_t) { shared_.failed[rank_].store(true); }
  bool Failed() { return shared_.failed[rank_].load(); }
  void Announce(uint64_t) {
    for (int32_t reader = 0; reader < num_ranks_; ++reader) {
      if (reader != rank_) shared_.addresses[reader][rank_] = own_;
    }
  }
  void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t epoch) {
    char* scratch[kMaxRanks];
    for (int32_t r = 0; r < num_ranks_; ++r) {
      scratch[r] = reinterpret_cast<char*>(shared_.scratch[epoch % kSlots][r].data());
    }
    const FlatMove& move = schedule.move(part.move);
    char* const* addresses[kMaxRanks] = {};
    for (int32_t i = 0; i <= move.num_sources; ++i) {  // the destination's slice, then the sources'
      const FlatSlice& slice = schedule.slice(move.slices + i);
      if (slice.slot == FlatSlice::kScratch) continue;
      addresses[slice.device] = slice.device == rank_ ? own_ : shared_.addresses[rank_][slice.device];
    }
    RunPart(schedule, part, Buffers{addresses, scratch, false});
  }

 private:
  Shared& shared_;
  const int32_t rank_, num_ranks_;
  char* const* own_;
  steady_clock::time_point begin_;
};

// Lets the workers of a rank go from call to call together: the order that a device's stream gives.
class Stream {
 public:
  explicit Stream(int workers) : workers_(workers) {}

  void Meet() {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++here_ == workers_) {
      here_ = 0;
      ++round_;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return round_ != round; });
  }

 private:
  const int workers_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int here_ = 0;
  int64_t round_ = 0;
};

// Whether all ranks get what they should in every call; with a rank missing, whether all others fail in the first.
bool RunThreads(const char* name, const ProgramBuilder& builder, Copies copies, int calls, int workers, bool missing) {
  const auto program = builder.Build();
  const Schedule schedule(*program, {copies, 64});
  const int ranks = program->num_devices;
  Shared shared;
  for (int rank = 0; rank < ranks; ++rank) {
    shared.addresses[rank].resize(static_cast<size_t>(ranks));
    for (auto& copy : shared.scratch) copy.emplace_back(schedule.view().rank(rank).scratch_bytes / sizeof(int64_t));
  }
  if (missing) shared.patience = std::chrono::milliseconds(100);
  std::atomic<int> wrong{0}, failed{0};
  auto run = [&](int rank, int worker, Stream& stream, std::vector<std::unique_ptr<Call>>& made) {
    for (int call = 0; call < calls; ++call) {
      if (worker == 0) made.push_back(std::make_unique<Call>(*program, call));
      stream.Meet();
      Call& own = *made.back();
      WaitingMemory memory(shared, rank, ranks, own.buffers[rank]);
      Worker<WaitingMemory> interpreter(schedule.view(), rank, worker, workers);
      const bool done = interpreter.Advance(memory) == Outcome::kDone;
      stream.Meet();
      if (!done) return static_cast<void>(++failed);
      if (worker != 0) continue;
      if (own.outputs[rank] != Expected(*program, call)[rank]) ++wrong;
      own.inputs[rank].assign(own.inputs[rank].size(), -7);  // nobody may read them any more
      own.outputs[rank].assign(own.outputs[rank].size(), -7);
    }
  };
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::vector<std::unique_ptr<Call>>> made(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  const int present = ranks - missing;
  for (int rank = 0; rank < present; ++rank) streams.push_back(std::make_unique<Stream>(workers));
  for (int rank = 0; rank < present; ++rank) {
    for (int worker = 0; worker < workers; ++worker) {
      threads.emplace_back(run, rank, worker, std::ref(*streams[rank]), std::ref(made[rank]));
    }
  }
  for (std::thread& thread : threads) thread.join();
  const bool ok = wrong == 0 && failed == (missing ? present * workers : 0);
  std::printf("%-5s threads: %s, %d workers a rank, %d calls%s\n", ok ? "ok" : "WRONG", name, workers, calls,
              missing ? ", a rank missing" : "");
  return ok;
}

// ---- The engine ---------------------------------------------------------------------------------------------------

// A chain of calls of every device, each begun where the one before ends.
class Launch {
 public:
  Launch(std::vector<std::shared_ptr<cpu::Exchange>> exchanges, int64_t run_id, int missing)
      : exchanges_(std::move(exchanges)), run_id_(run_id), missing_(missing) {
    for (size_t step = 0; step < exchanges_.size(); ++step) {
      calls_.push_back(std::make_unique<Call>(*exchanges_[step]->program, static_cast<int64_t>(step)));
    }
  }

  // Begins all devices but the missing ones on threads of their own and waits for the end of all chains.
  bool Run() {
    const int ranks = exchanges_[0]->program->num_devices - missing_;
    std::vector<std::thread> devices;
    for (int rank = 0; rank < ranks; ++rank) devices.emplace_back([this, rank] { Begin(rank, 0); });
    for (std::thread& device : devices) device.join();
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return num_ended_ == ranks; });
    return missing_ > 0 ? num_failed_ == ranks : num_failed_ == 0 && num_wrong_ == 0;
  }

  // Begins the missing devices, once the others have ended; whether they fail.
  bool RunMissing() {
    const int ranks = exchanges_[0]->program->num_devices;
    for (int rank = ranks - missing_; rank < ranks; ++rank) Begin(rank, 0);
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return num_ended_ == ranks; });
    return num_failed_ == ranks;
  }

 private:
  class Step : public cpu::RankCall {
   public:
    Step(Launch& launch, int rank, size_t step) : launch_(launch), rank_(rank), step_(step) {}
    void End() override { launch_.End(rank_, step_, failure.has_value()); }

   private:
    Launch& launch_;
    const int rank_;
    const size_t step_;
  };

  void Begin(int rank, size_t step) {
    auto call = std::make_unique<Step>(*this, rank, step);
    char* const* buffers = calls_[step]->buffers[rank];
    call->buffers = {buffers[0], buffers[1]};
    cpu::Engine::Get().Call(exchanges_[step], {run_id_, exchanges_[step]->instance}, rank, std::move(call));
  }

  void End(int rank, size_t step, bool failed) {
    const auto& program = *exchanges_[step]->program;
    const bool wrong = !failed && calls_[step]->outputs[rank] != Expected(program, static_cast<int64_t>(step))[rank];
    if (!failed) calls_[step]->inputs[rank].assign(calls_[step]->inputs[rank].size(), -7);
    if (!failed && step + 1 < exchanges_.size()) return Begin(rank, step + 1);
    std::lock_guard lock(mutex_);
    num_wrong_ += wrong;
    num_failed_ += failed;
    ++num_ended_;
    ended_.notify_all();
  }

  const std::vector<std::shared_ptr<cpu::Exchange>> exchanges_;
  const int64_t run_id_;
  const int missing_;
  std::vector<std::unique_ptr<Call>> calls_;  // by step
  std::mutex mutex_;
  std::condition_variable ended_;
  int num_ended_ = 0, num_failed_ = 0, num_wrong_ = 0;
};

std::shared_ptr<cpu::Exchange> MakeExchange(const ProgramBuilder& builder, int64_t id) {
  auto exchange = std::make_shared<cpu::Exchange>(builder.Build(), id, "check");
  exchange->instance = id;
  return exchange;
}

bool RunEngine(const char* name, const std::vector<ProgramBuilder>& builders, int repeats, int launches, int missing) {
  std::vector<std::shared_ptr<cpu::Exchange>> once, chain;
  for (const ProgramBuilder& builder : builders) {
    once.push_back(MakeExchange(builder, static_cast<int64_t>(once.size()) + 1));
  }
  for (int i = 0; i < repeats; ++i) chain.insert(chain.end(), once.begin(), once.end());
  static std::atomic<int64_t> run_ids{0};
  std::atomic<bool> ok{true};
  std::vector<std::thread> threads;
  for (int i = 0; i < launches; ++i) {
    threads.emplace_back([&] {
      if (!Launch(chain, ++run_ids, missing).Run()) ok = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%-5s engine: %s\n", ok ? "ok" : "WRONG", name);
  return ok;
}

// Devices that come as soon as the others have given up had no thread. Launches that were queued meanwhile fail at once
// and not after a timeout each; and no more when no call has come for a while.
bool RunBacklog() {
  const std::vector<std::shared_ptr<cpu::Exchange>> chain = {MakeExchange(AllGather(4, 50), 1000)};
  int64_t run_id = 1'000'000;
  cpu::Engine::Get().set_timeout_s(2);
  Launch starved(chain, run_id, 2);
  bool ok = starved.Run() && starved.RunMissing();
  for (int i = 0; i < 40; ++i) ok &= !Launch(chain, ++run_id, 0).Run();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ok &= Launch(chain, ++run_id, 0).Run();
  std::printf("%-5s engine: launches behind one whose devices had no thread\n", ok ? "ok" : "WRONG");
  return ok;
}

int Main() {
  bool ok = true;
  ok &= RunThreads("all-gather of 4", AllGather(4, 40), Copies::kPull, 20, 2, false);
  ok &= RunThreads("all-gather of 3, push", AllGather(3, 40), Copies::kPush, 20, 1, false);
  ok &= RunThreads("all-reduce of 3", AllReduce(3, 40), Copies::kPull, 20, 2, false);
  ok &= RunThreads("staged broadcast to 3", StagedBroadcast(4, 200), Copies::kPull, 40, 1, false);
  ok &= RunThreads("relay through 4, push", Relay(4, 200), Copies::kPush, 40, 1, false);
  ok &= RunThreads("ring of 4", Ring(4, 40), Copies::kPush, 20, 2, false);
  ok &= RunThreads("all-gather of 3", AllGather(3, 40), Copies::kPull, 2, 2, true);
  ok &= RunEngine("small exchanges, two launches at a time", {AllReduce(4, 50), Ring(4, 50)}, 10, 2, 0);
  ok &= RunEngine("large exchanges", {AllReduce(4, 20'000), AllGather(4, 20'000)}, 2, 1, 0);
  cpu::Engine::Get().set_timeout_s(0.2);
  ok &= RunEngine("a device missing", {AllGather(4, 50)}, 3, 1, 1);
  ok &= RunBacklog();
  if (cpu::Engine::Get().num_open() != 0 || !cpu::ReadCounters().empty()) ok = false;
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace einsummable::checks

int main() { return einsummable::checks::Main(); }
