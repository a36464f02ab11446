// `custom_calls/cuda/memory.cuh` in C++: what the PTX there does, by the host's own atomics.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

namespace einsummable::cuda {

inline uint64_t LoadAcquireSystem(const uint64_t* address) {
  emulated_gpu::Yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline uint32_t LoadAcquireSystem(const uint32_t* address) {
  emulated_gpu::Yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline void StoreReleaseSystem(uint64_t* address, uint64_t value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }

inline uint64_t AddAcqRelSystem(uint64_t* address, uint64_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

inline bool SetOnceSystem(uint32_t* address) {
  uint32_t expected = 0;
  return __atomic_compare_exchange_n(address, &expected, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

inline uint64_t ClockNs() { return emulated_gpu::ClockNs(); }

template <typename T>
T LoadData(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) emulated_gpu::Trap("a misaligned load");
  return *address;
}

template <typename T>
void StoreData(T* address, T value) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) emulated_gpu::Trap("a misaligned store");
  *address = value;
}

}  // namespace einsummable::cuda
