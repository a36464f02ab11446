// A GPU of this process: its memory for exchanges, and what its kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/rank_view.h"

namespace einsummable::cuda {

// Makes a device the current one of this thread, until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Memory of a device in chunks that are never given back to CUDA: freeing waits for all work of the device. What is given
// back here is used again by whoever asks next.
class Arena {
 public:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kChunkBytes = size_t{64} << 20;

  struct Block {
    char* address = nullptr;
    size_t bytes = 0;
  };

  // A block of at least `bytes` on the current device.
  Block Take(size_t bytes);
  void Give(const Block& block);

  // Where the allocation begins that `address` lies in.
  char* ChunkOf(const char* address) const;

 private:
  std::map<char*, size_t> free_;  // neighbours are merged
  std::map<char*, size_t> chunks_;
  mutable std::mutex mutex_;
};

class Device {
 public:
  explicit Device(int ordinal);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  int resident_blocks() const { return resident_blocks_; }
  int multiprocessors() const { return multiprocessors_; }
  cudaStream_t stream() const { return stream_; }
  Arena& arena() { return arena_; }
  DeviceShared* shared() const { return shared_; }
  const Float8* float8() const { return float8_; }
  Status* status() const { return status_; }
  const Settings* settings() const { return settings_; }

  // Copy between the host and memory of this device, and return when that is done. They go through a stream that waits for no
  // kernel, so that kernels which wait for other devices do not hold them up.
  void CopyIn(void* to, const void* from, size_t bytes);
  void CopyOut(void* to, const void* from, size_t bytes);

  void set_timeout_s(double timeout_s);
  // Has kernels that wait for another device fail, those that run and those to come, until `ResetStatus`.
  void Stop();
  // Forgets a failure of the device. The channels that have failed remain so.
  void ResetStatus();

 private:
  static constexpr size_t kStagingBytes = size_t{1} << 20;

  const int ordinal_;
  std::string name_;
  int resident_blocks_ = 0, multiprocessors_ = 0;
  cudaStream_t stream_ = nullptr;
  Arena arena_;
  DeviceShared* shared_ = nullptr;
  Float8* float8_ = nullptr;
  // Memory of the host. It outlives CUDA, since a thread looks at it until the process ends.
  Status* status_ = nullptr;
  Settings* settings_ = nullptr;
  std::mutex staging_mutex_;
  char* staging_ = nullptr;
};

}  // namespace einsummable::cuda
