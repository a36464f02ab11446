// The memory of the interpreter (`core/interpreter.h`) on a GPU: a worker is a block, a lane a thread of it.
//
// Kernels of this kind have failed elsewhere in ways that are known. Why they cannot here:
//   - Flags of several devices in one word, written without order (vllm PR 2760): each flag is a word of its own, on a
//     line of its own, written whole by one device with release and read with acquire, both at system scope. A block
//     counts at system scope too, so that what it wrote to other devices is there before another block publishes.
//   - A rank goes on while others still read its buffers (aiter issue 3515): no call ends before every rank whose moves
//     read or write this one's inputs or outputs has published that it is done with them.
//   - A round's number is an argument of the kernel, which a captured graph repeats, and flags are compared for equality
//     (aiter PR 3928): the epoch is derived from a count in device memory, and flags only grow and are compared with >=.
//   - Captured kernels stick when replayed (vllm issue 5854, which names no cause): nothing that a replay would need is kept on the host;
//     the addresses of buffers, which a captured kernel holds, are announced anew in every call; and no wait is endless.
//   - Two calls with the same flags at a time (sglang issue 31117): every exchange of an executable has its own flags,
//     mailboxes and scratch memory, and a token makes XLA run the exchanges of a program one after another.
//   - Flags zeroed after others know where they are (tvm PR 16797): a channel zeroes them when it is made, and only then
//     tells where they are.
//   - Handles for memory that the framework's allocator has mapped page by page (vllm issue 42609): only memory that
//     the engine itself has got from cudaMalloc is shared between processes.
//   - Peer access that the driver promises and the machine does not have (vllm issue 51513): before anything runs, every
//     ordered pair of devices writes and reads words that are then compared.
//   - A workspace that calls of all sizes share is cleared or used again while others still look at it (as in
//     TensorRT-LLM's all-reduces; taken to be issue 16899, whose text was not seen): each exchange has scratch memory of its own, as its program says,
//     made before it first runs, in two copies that take turns; one is written only when all have ended the call that
//     read it.
#pragma once

#include <cstdint>

#include "core/interpreter.h"
#include "cuda/box.cuh"
#include "cuda/memory.cuh"
#include "cuda/rank_view.h"

namespace einsummable::cuda {

// Operands of one move that are looked up once per part. Those of larger aggregations are looked up when needed.
inline constexpr int kCachedOperands = 64;

// What the threads of a block share.
struct BlockCache {
  Operand sources[kCachedOperands];
};

class RankMemory {
 public:
  // `peers` are those of the view, or a copy of them that is nearer.
  __device__ RankMemory(const ScheduleView& schedule, const RankView& view, const PeerView* peers, void* const* buffers,
                        BlockCache& cache)
      : schedule_(schedule), view_(view), peers_(peers), buffers_(buffers), cache_(cache) {}

  __device__ int32_t Lane() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ int32_t Lanes() const { return static_cast<int32_t>(blockDim.x); }
  __device__ bool All(bool x) { return __syncthreads_and(x) != 0; }

  __device__ uint64_t Count() { return LoadAcquireSystem(view_.count); }
  __device__ uint64_t AddToCount() { return AddAcqRelSystem(view_.count, 1) + 1; }
  __device__ uint64_t Progress(int32_t peer) { return LoadAcquireSystem(view_.flags + peer * kFlagStride); }
  __device__ void Publish(int32_t listener, uint64_t stamp) { StoreReleaseSystem(peers_[listener].flag, stamp); }

  // Hurries at first, then polls less often.
  __device__ bool Pause(int32_t peer, uint64_t stamp, uint64_t polls) {
    if (polls == 0) began_ns_ = ClockNs();
    if (polls % kPollsPerLook != kPollsPerLook - 1) return true;
    if (LoadAcquireSystem(view_.failed) != 0) return false;
    const uint64_t waited_ns = ClockNs() - began_ns_;
    if (waited_ns < kHurryNs) return true;
    if (LoadAcquireSystem(&view_.settings->stopped) != 0) {
      Fail(Reason::kStopped, peer, stamp);
      return false;
    }
    if (timeout_ns_ == 0) timeout_ns_ = LoadData(&view_.settings->timeout_ns);
    if (waited_ns < timeout_ns_) {
      __nanosleep(kRestNs);
      return true;
    }
    Fail(peer == view_.rank ? Reason::kStuckTeam : Reason::kMissingRank, peer, stamp);
    return false;
  }

  // Called by the interpreter for a peer that has said that it failed.
  __device__ void Fail(int32_t peer, uint64_t stamp) { Fail(Reason::kPeerFailed, peer, stamp); }

  // The first failure of the device is told to the host.
  __device__ void Fail(Reason reason, int64_t peer, uint64_t stamp) {
    if (!SetOnceSystem(view_.failed) || !SetOnceSystem(&view_.shared->failed)) return;
    Status& status = *view_.status;
    status.channel = view_.channel;
    status.rank = view_.rank;
    status.peer = peer;
    status.stamp = stamp;
    StoreReleaseSystem(&status.reason, static_cast<uint64_t>(reason));
  }

  // One lane looks: what the interpreter makes of it, it makes of all lanes together.
  __device__ bool Failed() { return Lane() == 0 && LoadAcquireSystem(view_.failed) != 0; }

  __device__ void Announce(uint64_t epoch) {
    const Range listeners = schedule_.rank(view_.rank).listeners;
    const int64_t slots = view_.num_slots;
    for (int64_t i = Lane(); i < listeners.size() * slots; i += Lanes()) {
      const PeerView& listener = peers_[schedule_.peer(listeners.begin + static_cast<int32_t>(i / slots))];
      const int64_t slot = i % slots;
      StoreData(listener.mailbox + Half(epoch) * slots + slot, reinterpret_cast<uint64_t>(buffers_[slot]));
    }
  }

  __device__ void Run(const ScheduleView& schedule, const FlatPart& part, uint64_t epoch) {
    if (part.bytes > 0) {
      char* const to = Address(schedule, part.destination, epoch);
      const char* const from = Address(schedule, part.source, epoch);
      const uint64_t apart = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
      if (apart % kPieceBytes == 0) return CopyRun(to, from, part.bytes);
    }
    const FlatMove move = schedule.move(part.move);
    const int64_t item = schedule.header().item_size;
    const int64_t* const extents = schedule.numbers(move.extents);
    const int64_t inner = move.rank == 0 ? 1 : extents[move.rank - 1];
    const Region region = {extents, move.rank, inner, part.begin, part.end};
    const Operand destination = OperandOf(schedule, schedule.destination(move), epoch);
    if (move.monoid == static_cast<int32_t>(Monoid::kCopy)) {
      return CopyBox(region, destination, OperandOf(schedule, schedule.source(move, 0), epoch), item);
    }
    __syncthreads();  // threads may still look at the operands of the part before
    for (int32_t s = Lane(); s < kCachedOperands && s < move.num_sources; s += Lanes()) {
      cache_.sources[s] = OperandOf(schedule, schedule.source(move, s), epoch);
    }
    __syncthreads();
    auto source = [&](int32_t s) {
      return s < kCachedOperands ? cache_.sources[s] : OperandOf(schedule, schedule.source(move, s), epoch);
    };
    const Aggregator aggregator(static_cast<DType>(schedule.header().dtype), static_cast<Monoid>(move.monoid),
                                view_.float8);
    ReduceBox(region, destination, move.num_sources, source, item, aggregator);
  }

  // Makes the outputs of a rank that has failed what nobody takes for results: floats become NaN.
  __device__ void SpoilOutputs(int32_t worker) {
    const int64_t stride = static_cast<int64_t>(view_.num_workers) * Lanes();
    for (int32_t slot = view_.num_inputs; slot < view_.num_slots; ++slot) {
      char* const output = static_cast<char*>(buffers_[slot]);
      for (int64_t i = static_cast<int64_t>(worker) * Lanes() + Lane(); i < view_.slot_bytes[slot]; i += stride) {
        StoreData(reinterpret_cast<uint8_t*>(output + i), uint8_t{0xff});
      }
    }
  }

 private:
  static constexpr uint64_t kPollsPerLook = 64;
  static constexpr uint64_t kHurryNs = 200'000;
  static constexpr unsigned kRestNs = 2'000;

  __device__ static int64_t Half(uint64_t epoch) { return static_cast<int64_t>(epoch % 2); }

  __device__ char* Address(const ScheduleView& schedule, const FlatAddress& place, uint64_t epoch) const {
    if (place.slot == FlatAddress::kScratch) {
      const int64_t copy = static_cast<int64_t>(epoch % kSlots) * schedule.rank(place.device).scratch_bytes;
      return peers_[place.device].scratch + copy + place.offset;
    }
    if (place.device == view_.rank) return static_cast<char*>(buffers_[place.slot]) + place.offset;
    const PeerView& peer = peers_[place.device];
    const uint64_t address = LoadData(peer.own_mailbox + Half(epoch) * peer.num_slots + place.slot);
    return reinterpret_cast<char*>(address) + place.offset;
  }

  __device__ Operand OperandOf(const ScheduleView& schedule, const FlatSlice& slice, uint64_t epoch) const {
    return {Address(schedule, slice, epoch), schedule.numbers(slice.strides)};
  }

  const ScheduleView& schedule_;
  const RankView& view_;
  const PeerView* const peers_;
  void* const* const buffers_;
  BlockCache& cache_;
  uint64_t began_ns_ = 0;
  uint64_t timeout_ns_ = 0;  // once it has been read, from memory of the host
};

}  // namespace einsummable::cuda
