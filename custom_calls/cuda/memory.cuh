// Memory operations in PTX: what crosses devices is spelled out here and nowhere else.
//
// Flags are written by one device only, whole and naturally aligned, with release, and read with acquire, both at
// system scope. Data is read and written with weak accesses that such flags order. No data is read through the
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

// At system scope although all its users are on one device: what the arriving block has written to peers' memory must
// be there before another block signals them.
__device__ __forceinline__ uint32_t AddAcqRelSystem(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.sys.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

// Nanoseconds of the device's clock.
__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A piece of data that one instruction moves.
template <int kBytes>
struct Piece;
template <>
struct Piece<1> {
  using Type = uint8_t;
};
template <>
struct Piece<2> {
  using Type = uint16_t;
};
template <>
struct Piece<4> {
  using Type = uint32_t;
};
template <>
struct Piece<8> {
  using Type = uint64_t;
};
template <>
struct Piece<16> {
  using Type = uint4;
};

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

}  // namespace einsummable::cuda
