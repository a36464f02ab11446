#include "cuda/device.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>

#include "core/float8.h"
#include "core/program.h"
#include "cuda/check.h"
#include "cuda/kernels.h"

namespace einsummable::cuda {
namespace {

constexpr DType kFloat8Types[kNumFloat8] = {DType::kF8E5M2,     DType::kF8E4M3FN, DType::kF8E4M3B11FNUZ,
                                            DType::kF8E5M2FNUZ, DType::kF8E4M3FNUZ, DType::kF8E4M3,
                                            DType::kF8E3M4,     DType::kF8E8M0FNU};

size_t RoundedUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Memory of the host that every device reaches at the host's own address.
void* PinnedMemory(size_t bytes) {
  constexpr size_t kPage = 4096;
  void* memory = std::aligned_alloc(kPage, RoundedUp(bytes, kPage));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, RoundedUp(bytes, kPage));
  EINSUMMABLE_CHECK_CUDA(cudaHostRegister(memory, RoundedUp(bytes, kPage), cudaHostRegisterPortable | cudaHostRegisterMapped));
  void* on_device = nullptr;
  EINSUMMABLE_CHECK_CUDA(cudaHostGetDevicePointer(&on_device, memory, 0));
  if (on_device != memory) throw CudaError("pinned memory has another address on the device than on the host");
  return memory;
}

}  // namespace

DeviceScope::DeviceScope(int device) {
  EINSUMMABLE_CHECK_CUDA(cudaGetDevice(&before_));
  if (before_ == device) return;
  EINSUMMABLE_CHECK_CUDA(cudaSetDevice(device));
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (changed_) cudaSetDevice(before_);
}

Arena::Block Arena::Take(size_t bytes) {
  bytes = RoundedUp(std::max(bytes, size_t{1}), kAlignment);
  std::lock_guard lock(mutex_);
  auto place = std::find_if(free_.begin(), free_.end(), [&](const auto& block) { return block.second >= bytes; });
  if (place == free_.end()) {
    void* chunk = nullptr;
    const size_t size = std::max(bytes, kChunkBytes);
    EINSUMMABLE_CHECK_CUDA(cudaMalloc(&chunk, size));
    chunks_.emplace(static_cast<char*>(chunk), size);
    place = free_.emplace(static_cast<char*>(chunk), size).first;
  }
  const auto [address, size] = *place;
  free_.erase(place);
  if (size > bytes) free_.emplace(address + bytes, size - bytes);
  return {address, bytes};
}

void Arena::Give(const Block& block) {
  if (block.address == nullptr) return;
  std::lock_guard lock(mutex_);
  auto place = free_.emplace(block.address, block.bytes).first;
  const auto next = std::next(place);
  // Chunks may happen to be neighbours, and remain apart.
  if (next != free_.end() && place->first + place->second == next->first && !chunks_.contains(next->first)) {
    place->second += next->second;
    free_.erase(next);
  }
  if (place == free_.begin() || chunks_.contains(place->first)) return;
  const auto previous = std::prev(place);
  if (previous->first + previous->second != place->first) return;
  previous->second += place->second;
  free_.erase(place);
}

char* Arena::ChunkOf(const char* address) const {
  std::lock_guard lock(mutex_);
  return std::prev(chunks_.upper_bound(const_cast<char*>(address)))->first;
}

Device::Device(int ordinal) : ordinal_(ordinal) {
  const DeviceScope scope(ordinal);
  cudaDeviceProp properties;
  EINSUMMABLE_CHECK_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  name_ = properties.name;
  multiprocessors_ = properties.multiProcessorCount;
  if (properties.cooperativeLaunch == 0) throw CudaError(name_ + " has no cooperative launches");
  LoadKernels();
  resident_blocks_ = ResidentBlocks(ordinal);
  EINSUMMABLE_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  staging_ = static_cast<char*>(PinnedMemory(kStagingBytes));
  char* const host = static_cast<char*>(PinnedMemory(2 * Arena::kAlignment));
  status_ = reinterpret_cast<Status*>(host);
  settings_ = reinterpret_cast<Settings*>(host + Arena::kAlignment);
  shared_ = reinterpret_cast<DeviceShared*>(arena_.Take(sizeof(DeviceShared)).address);
  const DeviceShared shared = {};
  CopyIn(shared_, &shared, sizeof(shared));
  std::array<Float8, kNumFloat8> tables;
  for (int i = 0; i < kNumFloat8; ++i) tables[i] = *Float8Table(kFloat8Types[i]);
  float8_ = reinterpret_cast<Float8*>(arena_.Take(sizeof(tables)).address);
  CopyIn(float8_, tables.data(), sizeof(tables));
}

void Device::CopyIn(void* to, const void* from, size_t bytes) {
  const DeviceScope scope(ordinal_);
  std::lock_guard lock(staging_mutex_);
  for (size_t done = 0; done < bytes; done += kStagingBytes) {
    const size_t count = std::min(kStagingBytes, bytes - done);
    std::memcpy(staging_, static_cast<const char*>(from) + done, count);
    EINSUMMABLE_CHECK_CUDA(cudaMemcpyAsync(static_cast<char*>(to) + done, staging_, count, cudaMemcpyHostToDevice, stream_));
    EINSUMMABLE_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }
}

void Device::CopyOut(void* to, const void* from, size_t bytes) {
  const DeviceScope scope(ordinal_);
  std::lock_guard lock(staging_mutex_);
  for (size_t done = 0; done < bytes; done += kStagingBytes) {
    const size_t count = std::min(kStagingBytes, bytes - done);
    EINSUMMABLE_CHECK_CUDA(
        cudaMemcpyAsync(staging_, static_cast<const char*>(from) + done, count, cudaMemcpyDeviceToHost, stream_));
    EINSUMMABLE_CHECK_CUDA(cudaStreamSynchronize(stream_));
    std::memcpy(static_cast<char*>(to) + done, staging_, count);
  }
}

void Device::set_timeout_s(double timeout_s) {
  __atomic_store_n(&settings_->timeout_ns, static_cast<uint64_t>(timeout_s * 1e9), __ATOMIC_RELEASE);
}

void Device::Stop() { __atomic_store_n(&settings_->stopped, uint64_t{1}, __ATOMIC_RELEASE); }

void Device::ResetStatus() {
  __atomic_store_n(&settings_->stopped, uint64_t{0}, __ATOMIC_RELEASE);
  __atomic_store_n(&status_->reason, uint64_t{0}, __ATOMIC_RELEASE);
  const DeviceShared shared = {};
  CopyIn(shared_, &shared, sizeof(shared));
}

}  // namespace einsummable::cuda
