// The exchange program as an engine runs it, decoded from the flat int64 vector that `encode.py` writes.
//
// The vector, version 1 (all numbers int64, sizes and offsets in elements):
//   magic, version, dtype code, number of devices D, number of rounds R,
//   D times: inputs I, I sizes, outputs O, O sizes, scratch buffers S, S sizes,
//   R times: number of moves M, then M times:
//     monoid code, rank K, sources N, K extents, then 1 + N slices, the destination first:
//       device, space, buffer, offset, K strides.
//
// Nothing here knows about threads, XLA or a particular memory: every engine shares it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace einsummable {

inline constexpr int64_t kMagic = 0x45494e4a4158;  // "EINJAX"
inline constexpr int64_t kVersion = 1;
inline constexpr int64_t kMaxRank = 32;
inline constexpr int64_t kMaxDevices = 1 << 16;
inline constexpr int64_t kMaxElements = int64_t{1} << 48;

enum class Monoid : int64_t { kCopy = 0, kSum, kProd, kMax, kMin, kAnd, kOr };
enum class Space : int64_t { kInput = 0, kOutput = 1, kScratch = 2 };
inline constexpr int kNumSpaces = 3;

// Element types, numbered as `XLA_FFI_DataType`.
enum class DType : int64_t {
  kPred = 1, kS8 = 2, kS16 = 3, kS32 = 4, kS64 = 5, kU8 = 6, kU16 = 7, kU32 = 8, kU64 = 9,
  kF16 = 10, kF32 = 11, kF64 = 12, kC64 = 15, kBF16 = 16, kC128 = 18,
  kF8E5M2 = 19, kF8E4M3FN = 20, kF8E4M3B11FNUZ = 23, kF8E5M2FNUZ = 24, kF8E4M3FNUZ = 25,
  kF8E4M3 = 28, kF8E3M4 = 29, kF8E8M0FNU = 33,
};

// Bytes of one element; 0 for a code that no engine supports.
int64_t ItemSize(DType dtype);

// Whether `monoid` is defined on `dtype` (no sums of booleans, no bitwise operations on floats).
bool Admits(Monoid monoid, DType dtype);

// A strided box of one buffer. `strides` points into the program's own copy of the encoding.
struct Slice {
  int32_t device;
  Space space;
  int32_t buffer;
  int32_t slot;  // of an input or output among the inputs, then outputs, of its device
  int64_t offset;
  const int64_t* strides;
};

// destination = aggregate of the sources. `extents` points into the program's copy of the encoding.
struct Move {
  Monoid monoid;
  int32_t rank;
  int32_t round;
  int64_t elements;
  int64_t remote_sources;  // sources on another device than the destination
  const int64_t* extents;
  Slice destination;
  std::vector<Slice> sources;
};

struct Program {
  DType dtype;
  int64_t item_size;
  int32_t num_devices;
  int32_t num_rounds;
  // sizes[device][space][buffer] in elements.
  std::vector<std::array<std::vector<int64_t>, kNumSpaces>> sizes;
  std::vector<Move> moves;  // in round order
  std::vector<int64_t> encoding;

  Program() = default;
  Program(const Program&) = delete;  // slices point into `encoding`
  Program& operator=(const Program&) = delete;
};

// Bytes that a move reads and writes for one element of its destination.
int64_t ElementTraffic(const Program& program, const Move& move);

// Bytes that all moves read and write.
double TrafficBytes(const Program& program);

// The decoded program, or a message that says what is wrong with the encoding and where.
std::variant<std::unique_ptr<const Program>, std::string> Decode(const int64_t* data, size_t length);

}  // namespace einsummable
