// The little of the CUDA runtime that tests and the self test need from Python: memory, streams, graphs, time.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/message.h"

using einsummable::cuda::DeviceScope;
using einsummable::cuda::Guarded;

namespace {

cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

EINSUMMABLE_EXPORT int EinsummableCudaMalloc(int64_t device, int64_t bytes, void** memory, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const DeviceScope scope(static_cast<int>(device));
    EINSUMMABLE_CHECK_CUDA(cudaMalloc(memory, static_cast<size_t>(bytes)));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaFree(void* memory, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaFree(memory));
    return 0;
  });
}

// Between any two places, of the host or of devices.
EINSUMMABLE_EXPORT int EinsummableCudaCopy(void* to, const void* from, int64_t bytes, void* stream, char* message,
                                           int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, StreamOf(stream)));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaStreamCreate(int64_t device, void** stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const DeviceScope scope(static_cast<int>(device));
    cudaStream_t made = nullptr;
    EINSUMMABLE_CHECK_CUDA(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    *stream = made;
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaStreamDestroy(void* stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaStreamDestroy(StreamOf(stream)));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaStreamSynchronize(void* stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaStreamSynchronize(StreamOf(stream)));
    return 0;
  });
}

// Makes `stream` wait for what has been enqueued on `other`.
EINSUMMABLE_EXPORT int EinsummableCudaStreamWait(void* stream, void* other, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    cudaEvent_t event = nullptr;
    EINSUMMABLE_CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    EINSUMMABLE_CHECK_CUDA(cudaEventRecord(event, StreamOf(other)));
    EINSUMMABLE_CHECK_CUDA(cudaStreamWaitEvent(StreamOf(stream), event, 0));
    EINSUMMABLE_CHECK_CUDA(cudaEventDestroy(event));
    return 0;
  });
}

// Between these two, what is enqueued on `stream` (and on streams that wait for it and that it waits for at the end) is captured.
EINSUMMABLE_EXPORT int EinsummableCudaGraphBegin(void* stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaStreamBeginCapture(StreamOf(stream), cudaStreamCaptureModeThreadLocal));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaGraphEnd(void* stream, void** graph, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    cudaGraph_t captured = nullptr;
    cudaGraphExec_t executable = nullptr;
    EINSUMMABLE_CHECK_CUDA(cudaStreamEndCapture(StreamOf(stream), &captured));
    EINSUMMABLE_CHECK_CUDA(cudaGraphInstantiate(&executable, captured, 0));
    EINSUMMABLE_CHECK_CUDA(cudaGraphDestroy(captured));
    *graph = executable;
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaGraphLaunch(void* graph, void* stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), StreamOf(stream)));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaGraphDestroy(void* graph, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    EINSUMMABLE_CHECK_CUDA(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
    return 0;
  });
}

// Keeps the stream busy for a while.
EINSUMMABLE_EXPORT int EinsummableCudaDelay(int64_t ns, void* stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    einsummable::cuda::LaunchDelay(static_cast<uint64_t>(ns), StreamOf(stream));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaEventRecord(void* stream, void** event, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    cudaEvent_t made = nullptr;
    EINSUMMABLE_CHECK_CUDA(cudaEventCreate(&made));
    EINSUMMABLE_CHECK_CUDA(cudaEventRecord(made, StreamOf(stream)));
    *event = made;
    return 0;
  });
}

// Milliseconds from `begin` to `end`, once both have been; they are destroyed. Negative with a message if that fails.
EINSUMMABLE_EXPORT double EinsummableCudaElapsedMs(void* begin, void* end, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&]() -> double {
    float ms = 0;
    EINSUMMABLE_CHECK_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(end)));
    EINSUMMABLE_CHECK_CUDA(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)));
    EINSUMMABLE_CHECK_CUDA(cudaEventDestroy(static_cast<cudaEvent_t>(begin)));
    EINSUMMABLE_CHECK_CUDA(cudaEventDestroy(static_cast<cudaEvent_t>(end)));
    return ms;
  });
}
