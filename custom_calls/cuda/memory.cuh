// Memory operations in PTX: what crosses devices is spelled out here and nowhere else.
//
// Flags are written by one device only, whole and naturally aligned, with release, and read with acquire, both at
// system scope. Data is read and written with weak accesses, which such flags order. No data is read through the
// read-only path (`.nc`): other devices write it while the kernel runs.
#pragma once

#include <cstdint>

namespace einsummable::cuda {

__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void StoreReleaseSystem(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

// At system scope although all its users are on one device: what the adding block has written to peers' memory must be
// there before another block signals them.
__device__ __forceinline__ uint64_t AddAcqRelSystem(uint64_t* address, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.acq_rel.sys.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
  return old;
}

__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Sets a word that is 0 to 1; whether it was 0.
__device__ __forceinline__ bool SetOnceSystem(uint32_t* address) {
  uint32_t old;
  asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(address) : "memory");
  return old == 0;
}

// Nanoseconds of the device's clock.
__device__ __forceinline__ uint64_t ClockNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// ---- Data ---------------------------------------------------------------------------------------------------

// Loads do not allocate in the first-level cache: what other devices write is read once.
__device__ __forceinline__ uint8_t LoadData(const uint8_t* address) {
  uint32_t value;
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return static_cast<uint8_t>(value);
}

__device__ __forceinline__ uint16_t LoadData(const uint16_t* address) {
  uint16_t value;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t LoadData(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t LoadData(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint4 LoadData(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void StoreData(uint8_t* address, uint8_t value) {
  asm volatile("st.global.u8 [%0], %1;" : : "l"(address), "r"(static_cast<uint32_t>(value)) : "memory");
}

__device__ __forceinline__ void StoreData(uint16_t* address, uint16_t value) {
  asm volatile("st.global.u16 [%0], %1;" : : "l"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void StoreData(uint32_t* address, uint32_t value) {
  asm volatile("st.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreData(uint64_t* address, uint64_t value) {
  asm volatile("st.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void StoreData(uint4* address, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

}  // namespace einsummable::cuda
