#include "cuda/kernels.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/check.h"
#include "cuda/rank_memory.cuh"

namespace einsummable::cuda {
namespace {

// What a block keeps near of the schedule and the peers, if it fits.
constexpr int64_t kCachedScheduleBytes = 24 << 10;
constexpr int kCachedPeers = 32;

struct alignas(16) ScheduleCache {
  char bytes[kCachedScheduleBytes];
};

template <int kCapacity>
struct Arguments {
  RankLaunch launch;
  void* buffers[kCapacity];
};

// Copies whole words; `bytes` is a multiple of 8.
__device__ void CopyToShared(void* to, const void* from, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes / 8; i += blockDim.x) {
    static_cast<uint64_t*>(to)[i] = LoadData(static_cast<const uint64_t*>(from) + i);
  }
}

// One block's part of one rank's call. Not inlined: one body serves all kernels.
__device__ __noinline__ void RunWorker(const RankLaunch& launch, void* const* buffers, int32_t worker) {
  __shared__ ScheduleCache schedule_cache;
  __shared__ PeerView peer_cache[kCachedPeers];
  __shared__ BlockCache block_cache;
  const void* block = launch.schedule;
  const ScheduleHeader* const header = static_cast<const ScheduleHeader*>(block);
  const PeerView* peers = launch.view.peers;
  const int64_t schedule_bytes = header->bytes;
  const int32_t num_ranks = header->num_ranks;
  if (schedule_bytes <= kCachedScheduleBytes) {
    CopyToShared(schedule_cache.bytes, block, schedule_bytes);
    block = schedule_cache.bytes;
  }
  if (num_ranks <= kCachedPeers) {
    CopyToShared(peer_cache, peers, num_ranks * static_cast<int64_t>(sizeof(PeerView)));
    peers = peer_cache;
  }
  __syncthreads();
  const ScheduleView schedule(block);
  RankMemory memory(schedule, launch.view, peers, buffers, block_cache);
  // By threads that have little else to do.
  if (worker == 0 && memory.Lane() == memory.Lanes() - 1 && launch.rank_operand != nullptr) {
    const int32_t rank = *launch.rank_operand;
    if (rank != launch.view.rank) memory.Fail(Reason::kWrongRank, rank, 0);
  }
  if (worker == 0 && memory.Lane() == memory.Lanes() / 2 && launch.token_out != launch.token_in) {
    *launch.token_out = *launch.token_in;
  }
  Worker<RankMemory> state(schedule, launch.view.rank, worker, launch.view.num_workers);
  if (state.Advance(memory) == Outcome::kFailed) memory.SpoilOutputs(worker);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    ExchangeKernel(const __grid_constant__ Arguments<kCapacity> arguments) {
  RunWorker(arguments.launch, arguments.buffers, static_cast<int32_t>(blockIdx.x));
}

__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    RanksKernel(const RankLaunch* launches, void* const* const* buffers, int32_t num_workers) {
  const int32_t rank = static_cast<int32_t>(blockIdx.x) / num_workers;
  RunWorker(launches[rank], buffers[rank], static_cast<int32_t>(blockIdx.x) % num_workers);
}

__global__ void WriteKernel(int32_t* word, int32_t value) { *word = value; }

__global__ void ProbeKernel(uint32_t* remote, const uint32_t* source, uint32_t* local, int words, uint32_t pattern) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    StoreData(remote + i, pattern + static_cast<uint32_t>(i));
    StoreData(local + i, LoadData(source + i));
  }
  __threadfence_system();
}

__global__ void DelayKernel(uint64_t ns) {
  const uint64_t begin = ClockNs();
  while (ClockNs() - begin < ns) __nanosleep(1000);
}

constexpr auto kFew = ExchangeKernel<kFewBuffers>;
constexpr auto kMany = ExchangeKernel<kMaxBuffers>;
static_assert(sizeof(Arguments<kMaxBuffers>) <= 4096);

template <typename Kernel, typename... Arguments>
void Enqueue(Kernel kernel, int blocks, int threads, bool cooperative, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative ? 1 : 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  EINSUMMABLE_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <int kCapacity>
void Launch(const RankLaunch& launch, const std::vector<void*>& buffers, bool cooperative, cudaStream_t stream) {
  Arguments<kCapacity> arguments = {launch, {}};
  std::copy(buffers.begin(), buffers.end(), arguments.buffers);
  Enqueue(ExchangeKernel<kCapacity>, launch.view.num_workers, kThreadsPerBlock, cooperative, stream, arguments);
}

}  // namespace

int ResidentBlocks(int device) {
  int processors = 0, fewest = 0, blocks = 0;
  EINSUMMABLE_CHECK_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  EINSUMMABLE_CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fewest, kFew, kThreadsPerBlock, 0));
  EINSUMMABLE_CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kMany, kThreadsPerBlock, 0));
  fewest = std::min(fewest, blocks);
  EINSUMMABLE_CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, RanksKernel, kThreadsPerBlock, 0));
  return processors * std::min(fewest, blocks);
}

void LoadKernels() {
  cudaFuncAttributes attributes;
  EINSUMMABLE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kFew));
  EINSUMMABLE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kMany));
  EINSUMMABLE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, RanksKernel));
  EINSUMMABLE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, WriteKernel));
  EINSUMMABLE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, ProbeKernel));
  EINSUMMABLE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, DelayKernel));
}

void LaunchRank(const RankLaunch& launch, const std::vector<void*>& buffers, bool cooperative, cudaStream_t stream) {
  if (buffers.size() <= kFewBuffers) return Launch<kFewBuffers>(launch, buffers, cooperative, stream);
  if (buffers.size() <= kMaxBuffers) return Launch<kMaxBuffers>(launch, buffers, cooperative, stream);
  throw std::invalid_argument("a rank has " + std::to_string(buffers.size()) + " inputs and outputs, at most " +
                              std::to_string(kMaxBuffers) + " are supported on a GPU");
}

void LaunchRanks(const RankLaunch* launches, void* const* const* buffers, int num_ranks, int num_workers,
                 cudaStream_t stream) {
  Enqueue(RanksKernel, num_ranks * num_workers, kThreadsPerBlock, /*cooperative=*/true, stream, launches, buffers,
          static_cast<int32_t>(num_workers));
}

void LaunchWrite(int32_t* word, int32_t value, cudaStream_t stream) {
  Enqueue(WriteKernel, 1, 1, /*cooperative=*/false, stream, word, value);
}

void LaunchProbe(uint32_t* remote, const uint32_t* source, uint32_t* local, int words, uint32_t pattern,
                 cudaStream_t stream) {
  Enqueue(ProbeKernel, 1, kThreadsPerBlock, /*cooperative=*/false, stream, remote, source, local, words, pattern);
}

void LaunchDelay(uint64_t ns, cudaStream_t stream) {
  Enqueue(DelayKernel, 1, 1, /*cooperative=*/false, stream, ns);
}

}  // namespace einsummable::cuda
