// The kernels, as the host launches them. All are enqueued on a stream and return at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/rank_view.h"

namespace einsummable::cuda {

inline constexpr int kThreadsPerBlock = 512;
// Inputs and outputs of one rank: their addresses are arguments of the kernel, which may take 4 KiB.
inline constexpr int kMaxBuffers = 480;
// Inputs and outputs up to which a kernel with fewer arguments is used.
inline constexpr int kFewBuffers = 16;

// One rank's part of one call.
struct RankLaunch {
  const void* schedule;    // its block, in device memory
  RankView view;
  // The rank as the executable has it, and the token to hand on, in device memory; may be null.
  const int32_t* rank_operand;
  const int32_t* token_in;
  int32_t* token_out;
};

// Blocks of the exchange kernels that are resident on `device` at once: the most that all workers there may be together.
int ResidentBlocks(int device);

// Loads every kernel on the current device, so that no launch has to.
void LoadKernels();

// One rank. `cooperative`: CUDA sees to it that all blocks are resident together. Where several ranks share a device that is not
// enough, and whoever launches them sees to it that all together are.
void LaunchRank(const RankLaunch& launch, const std::vector<void*>& buffers, bool cooperative, cudaStream_t stream);

// Several ranks in one launch, all with the same number of workers. In device memory: `launches`, and for rank i the
// addresses of its buffers from `buffers[i]` on.
void LaunchRanks(const RankLaunch* launches, void* const* const* buffers, int num_ranks, int num_workers,
                 cudaStream_t stream);

// Writes `value` to one word.
void LaunchWrite(int32_t* word, int32_t value, cudaStream_t stream);

// Writes `pattern + i` to words i of `remote`, and copies `words` from `source` on, which may be remote too, to `local`.
void LaunchProbe(uint32_t* remote, const uint32_t* source, uint32_t* local, int words, uint32_t pattern,
                 cudaStream_t stream);

// Keeps the stream busy.
void LaunchDelay(uint64_t ns, cudaStream_t stream);

}  // namespace einsummable::cuda
