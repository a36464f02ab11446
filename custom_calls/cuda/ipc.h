// Memory of other processes of the job, one process for each GPU.
//
// Only memory of our own arena is shared this way, which comes from `cudaMalloc`: buffers of XLA may come from allocators
// whose memory has no such handles. So exchanges between processes go through scratch memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/channel.h"

namespace einsummable::cuda {

// A place in an arena, for another process. Plain bytes.
struct SharedPlace {
  cudaIpcMemHandle_t chunk;
  uint64_t offset;
};

// What a process tells the others of one rank of a channel.
struct Ticket {
  SharedPlace control, scratch;
  uint64_t fingerprint;  // of the program: whoever has another one must not connect
};

SharedPlace Share(Device& device, const char* address);
// Where `place` is for this process. A chunk is mapped once, on the device that is current the first time.
char* Map(const SharedPlace& place);

Ticket MakeTicket(const Channel& channel, int32_t rank);
void Connect(Channel& channel, int32_t rank, const Ticket& ticket);

}  // namespace einsummable::cuda
