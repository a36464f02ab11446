// The little of the CUDA runtime's interface that the engine uses, for emulated GPUs: kernels run in threads of the host.
//
// A block is a thread, its threads are fibers of that one: so a variable of the thread is a shared variable of the block.
// Blocks have fewer threads than asked for. Memory of devices is memory that other processes can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local
#define EINSUMMABLE_EMULATED_GPU 1

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1) : x(x) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

extern thread_local dim3 threadIdx, blockIdx, blockDim;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorPeerAccessAlreadyEnabled = 704,
};

namespace emulated_gpu {

struct Stream;
struct Event;
struct Graph;

void Yield();
uint64_t ClockNs();
[[noreturn]] void Trap(const char* what);
// A stream on which what is enqueued is done at once.
Stream* ImmediateStream();
// Runs the blocks of a kernel, each thread of which does `thread`.
cudaError_t Enqueue(Stream* stream, unsigned blocks, unsigned threads, std::function<void()> thread);

}  // namespace emulated_gpu

using cudaStream_t = emulated_gpu::Stream*;
using cudaEvent_t = emulated_gpu::Event*;
using cudaGraph_t = emulated_gpu::Graph*;
struct cudaGraphExec;
using cudaGraphExec_t = cudaGraphExec*;
struct cudaMemPool;
using cudaMemPool_t = cudaMemPool*;

int __syncthreads_and(int predicate);
inline void __syncthreads() { __syncthreads_and(1); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __nanosleep(unsigned ns);

struct cudaDeviceProp {
  char name[256];
  int multiProcessorCount, cooperativeLaunch;
};
struct cudaFuncAttributes {};
struct cudaIpcMemHandle_t {
  char reserved[64];
};
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1 };
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
enum cudaMemAccessFlags { cudaMemAccessFlagsProtNone = 0, cudaMemAccessFlagsProtReadWrite = 3 };
struct cudaMemAccessDesc {
  cudaMemLocation location;
  cudaMemAccessFlags flags;
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostRegisterPortable = 1,
                          cudaHostRegisterMapped = 2, cudaIpcMemLazyEnablePeerAccess = 1;
inline constexpr unsigned long long cudaEnableDefault = 0;

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaGetLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemPoolGetAccess(cudaMemAccessFlags* flags, cudaMemPool_t pool, cudaMemLocation* location);
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* access, size_t count);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* result);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory);
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end);

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  return emulated_gpu::Enqueue(config->stream, config->gridDim.x, config->blockDim.x,
                               [=] { kernel(static_cast<std::decay_t<Parameters>>(arguments)...); });
}
