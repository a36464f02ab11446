// Whether GPUs reach each other's memory: tried, and not only asked.
//
// `cudaDeviceCanAccessPeer` looks at what the hardware is, and not at whether writes arrive: behind an IOMMU, or with PCIe's
// access control on, they may be dropped silently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/device.h"

namespace einsummable::cuda {

// What is wrong with the way from `from` to `to`, empty if nothing is: access could not be enabled, or what a kernel of
// `from` wrote to the memory of `to` is not there, or what it read there is not what is there.
std::string ProbePeer(Device& from, Device& to);

// Memory in which other processes try the same: a region of known words that they read, and one for each of them to write.
class ProbeBoard {
 public:
  ProbeBoard(Device& device, int participant, int num_participants);
  ~ProbeBoard();
  ProbeBoard(const ProbeBoard&) = delete;
  ProbeBoard& operator=(const ProbeBoard&) = delete;

  Device& device() const { return device_; }
  char* address() const { return block_.address; }
  // What is wrong with the board of `other`, mapped at `remote`: it is written to, and read.
  std::string Try(int other, char* remote);
  // What is wrong with what `other` has written here.
  std::string Verify(int other);

 private:
  Device& device_;
  const int participant_;
  Arena::Block block_, local_;
};

// Buffers that kernels of other devices have to reach. XLA allocates them in one of several ways, not all of which make
// memory known to other devices.
class Reach {
 public:
  // Makes sure that the kernels of `peers` reach the allocation of `device` that `address` lies in. Looks at each allocation
  // once. Throws CudaError if they do not.
  void Ensure(const Device& device, const void* address, const std::vector<Device*>& peers);

 private:
  struct Known {
    const Device* peer;
    uintptr_t begin, end;
  };

  std::mutex mutex_;
  std::vector<Known> known_;
};

}  // namespace einsummable::cuda
