// Copies and aggregations over strided boxes by all threads of a block.
//
// Where every operand runs through the innermost dimension without gaps, work is dealt out in *pieces*: the 16 bytes
// between two multiples of 16 of the destination's address, or what of them lies in a row of the box. A piece that is
// whole, and whose sources are aligned, is one vector access per operand; heads and tails of rows, and rows whose
// sources are aligned differently, are done in smaller units. Elsewhere a piece is one element.
#pragma once

#include <cstdint>

#include "core/program.h"
#include "cuda/aggregate.cuh"
#include "cuda/memory.cuh"

namespace einsummable::cuda {

inline constexpr int64_t kPieceBytes = 16;
// Pieces that a thread loads before it stores the first.
inline constexpr int kUnroll = 4;
inline constexpr int kRunUnroll = 8;

// One operand of a move: where the first element of its box is, and the strides in elements.
struct Operand {
  char* base;
  const int64_t* strides;
};

// Quotient and rest, in 32 bits where they do: that takes a third of the time.
__device__ __forceinline__ uint64_t DivMod(uint64_t a, uint64_t b, uint64_t& rest) {
  if (((a | b) >> 32) == 0) {
    const uint32_t quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    rest = static_cast<uint32_t>(a) - quotient * static_cast<uint32_t>(b);
    return quotient;
  }
  const uint64_t quotient = a / b;
  rest = a - quotient * b;
  return quotient;
}

// Elements [begin, end) of a move's box, counted in row-major order.
struct Region {
  const int64_t* extents;
  int32_t rank;
  int64_t inner;  // extent of the innermost dimension
  int64_t begin, end;

  __device__ int64_t InnerStride(const Operand& operand) const { return rank == 0 ? 1 : operand.strides[rank - 1]; }

  // Of the first element of row `row`, in elements from the operand's base. The row's place in each dimension is worked out
  // anew for each operand: kept in an array, it would take local memory for every thread of the device.
  __device__ int64_t RowOffset(int64_t row, const Operand& operand) const {
    if (rank <= 1) return 0;
    int64_t offset = 0;
    uint64_t rest = static_cast<uint64_t>(row);
#pragma unroll 1
    for (int32_t dim = rank - 2; dim > 0; --dim) {
      uint64_t index;
      rest = DivMod(rest, static_cast<uint64_t>(extents[dim]), index);
      offset += static_cast<int64_t>(index) * operand.strides[dim];
    }
    return offset + static_cast<int64_t>(rest) * operand.strides[0];
  }
};

// Part of one row: `bytes` at `to` of the destination, and in a source at the place of the row's element `column`,
// `bytes_on` further.
struct Piece {
  int64_t row, column, bytes_on;
  char* to;
  int64_t bytes;  // none if there is nothing here
};

class Pieces {
 public:
  // `gapless`: whether all operands have the innermost stride 1.
  __device__ Pieces(const Region& region, const Operand& destination, int64_t item, bool gapless)
      : region_(region), destination_(destination), item_(item) {
    if (!gapless) {
      count_ = region.end - region.begin;
      return;
    }
    first_row_ = region.begin / region.inner;
    const int64_t rows = (region.end - 1) / region.inner - first_row_ + 1;
    const int64_t row_bytes = (rows == 1 ? region.end - region.begin : region.inner) * item;
    per_row_ = (row_bytes + kPieceBytes - 1) / kPieceBytes + (IsAligned(rows) ? 0 : 1);
    count_ = rows * per_row_;
  }

  __device__ int64_t count() const { return count_; }

  __device__ Piece At(int64_t number) const { return per_row_ == 0 ? Element(number) : OfRow(number); }

  __device__ const char* From(const Piece& piece, const Operand& source) const {
    const int64_t column = piece.column == 0 ? 0 : piece.column * region_.InnerStride(source);
    return source.base + (region_.RowOffset(piece.row, source) + column) * item_ + piece.bytes_on;
  }

 private:
  __device__ Piece Element(int64_t number) const {
    uint64_t column;
    const int64_t row = static_cast<int64_t>(DivMod(static_cast<uint64_t>(region_.begin + number),
                                                    static_cast<uint64_t>(region_.inner), column));
    const int64_t offset = region_.RowOffset(row, destination_) +
                           static_cast<int64_t>(column) * region_.InnerStride(destination_);
    return {row, static_cast<int64_t>(column), 0, destination_.base + offset * item_, item_};
  }

  __device__ Piece OfRow(int64_t number) const {
    uint64_t place = static_cast<uint64_t>(number);
    int64_t row = first_row_;
    if (count_ != per_row_) {
      row += static_cast<int64_t>(DivMod(static_cast<uint64_t>(number), static_cast<uint64_t>(per_row_), place));
    }
    char* const base = destination_.base + region_.RowOffset(row, destination_) * item_;
    const int64_t first = row * region_.inner;
    char* const low = base + (region_.begin > first ? region_.begin - first : 0) * item_;
    char* const high = base + (region_.end - first < region_.inner ? region_.end - first : region_.inner) * item_;
    char* from = low - reinterpret_cast<uintptr_t>(low) % kPieceBytes + static_cast<int64_t>(place) * kPieceBytes;
    char* to = from + kPieceBytes;
    from = from < low ? low : from;
    to = to > high ? high : to;
    return {row, 0, from - base, from, to > from ? to - from : 0};
  }

  // Whether the first piece of every row is whole.
  __device__ bool IsAligned(int64_t rows) const {
    if (rows == 1) {
      const int64_t column = region_.begin - first_row_ * region_.inner;
      const char* first = destination_.base + (region_.RowOffset(first_row_, destination_) + column) * item_;
      return reinterpret_cast<uintptr_t>(first) % kPieceBytes == 0;
    }
    uint64_t bits = reinterpret_cast<uintptr_t>(destination_.base) |
                    static_cast<uint64_t>((region_.inner | region_.begin) * item_);
    for (int32_t dim = 0; dim < region_.rank - 1; ++dim) {
      bits |= static_cast<uint64_t>(destination_.strides[dim] * item_);
    }
    return bits % kPieceBytes == 0;
  }

  const Region region_;
  const Operand destination_;
  const int64_t item_;
  int64_t first_row_ = 0, per_row_ = 0, count_;
};

__device__ __forceinline__ bool IsVector(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPieceBytes == 0;
}

template <typename Unit>
__device__ __forceinline__ void CopyUnits(char* to, const char* from, int64_t bytes) {
#pragma unroll 1
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(sizeof(Unit))) {
    StoreData(reinterpret_cast<Unit*>(to + i), LoadData(reinterpret_cast<const Unit*>(from + i)));
  }
}

// Up to 16 bytes in the largest units that both addresses and the length allow.
__device__ __noinline__ void CopySmall(char* to, const char* from, int64_t bytes) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uint64_t>(bytes);
  if (bits % 8 == 0) return CopyUnits<uint64_t>(to, from, bytes);
  if (bits % 4 == 0) return CopyUnits<uint32_t>(to, from, bytes);
  if (bits % 2 == 0) return CopyUnits<uint16_t>(to, from, bytes);
  CopyUnits<uint8_t>(to, from, bytes);
}

// One run of memory to another, both with the same distance to a multiple of 16.
__device__ __noinline__ void CopyRun(char* to, const char* from, int64_t bytes) {
  const int64_t before = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kPieceBytes);
  const int64_t head = before < bytes ? before : bytes;
  const int64_t tail = (bytes - head) % kPieceBytes;
  if (threadIdx.x == 0 && head > 0) CopySmall(to, from, head);
  if (threadIdx.x == blockDim.x - 1 && tail > 0) CopySmall(to + bytes - tail, from + bytes - tail, tail);
  uint4* const target = reinterpret_cast<uint4*>(to + head);
  const uint4* const source = reinterpret_cast<const uint4*>(from + head);
  const int64_t count = (bytes - head) / kPieceBytes, stride = blockDim.x;
  int64_t i = threadIdx.x;
#pragma unroll 1
  for (; i + (kRunUnroll - 1) * stride < count; i += kRunUnroll * stride) {
    uint4 values[kRunUnroll];
#pragma unroll
    for (int u = 0; u < kRunUnroll; ++u) values[u] = LoadData(source + i + u * stride);
#pragma unroll
    for (int u = 0; u < kRunUnroll; ++u) StoreData(target + i + u * stride, values[u]);
  }
#pragma unroll 1
  for (; i < count; i += stride) StoreData(target + i, LoadData(source + i));
}

__device__ __noinline__ void CopyBox(const Region& region, const Operand& destination, const Operand& source, int64_t item) {
  const bool gapless = region.InnerStride(destination) == 1 && region.InnerStride(source) == 1;
  const Pieces pieces(region, destination, item, gapless);
  const int64_t stride = static_cast<int64_t>(blockDim.x);
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < pieces.count(); i += kUnroll * stride) {
    uint4 values[kUnroll];
    char* targets[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      targets[u] = nullptr;
      if (i + u * stride >= pieces.count()) continue;
      const Piece piece = pieces.At(i + u * stride);
      const char* const from = pieces.From(piece, source);
      if (piece.bytes == kPieceBytes && IsVector(piece.to) && IsVector(from)) {
        values[u] = LoadData(reinterpret_cast<const uint4*>(from));
        targets[u] = piece.to;
      } else {
        CopySmall(piece.to, from, piece.bytes);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (targets[u] != nullptr) StoreData(reinterpret_cast<uint4*>(targets[u]), values[u]);
    }
  }
}

// One element, or 16 bytes of them, in the first bytes of the result.
__device__ __noinline__ uint4 LoadElement(const char* from, int64_t item) {
  uint4 value = {0, 0, 0, 0};
  switch (item) {
    case 1: value.x = LoadData(reinterpret_cast<const uint8_t*>(from)); break;
    case 2: value.x = LoadData(reinterpret_cast<const uint16_t*>(from)); break;
    case 4: value.x = LoadData(reinterpret_cast<const uint32_t*>(from)); break;
    case 8: {
      const uint64_t both = LoadData(reinterpret_cast<const uint64_t*>(from));
      value.x = static_cast<uint32_t>(both);
      value.y = static_cast<uint32_t>(both >> 32);
      break;
    }
    default: value = LoadData(reinterpret_cast<const uint4*>(from));
  }
  return value;
}

__device__ __noinline__ void StoreElement(char* to, uint4 value, int64_t item) {
  switch (item) {
    case 1: return StoreData(reinterpret_cast<uint8_t*>(to), static_cast<uint8_t>(value.x));
    case 2: return StoreData(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(value.x));
    case 4: return StoreData(reinterpret_cast<uint32_t*>(to), value.x);
    case 8: return StoreData(reinterpret_cast<uint64_t*>(to), value.x | static_cast<uint64_t>(value.y) << 32);
    default: return StoreData(reinterpret_cast<uint4*>(to), value);
  }
}

__device__ __forceinline__ uint4 LoadUnit(const char* from, int64_t unit) {
  return unit == kPieceBytes ? LoadData(reinterpret_cast<const uint4*>(from)) : LoadElement(from, unit);
}

// `source(s)` is the operand of source `s` of `num_sources`. What a source contributes is loaded while the one before it is
// aggregated.
template <typename Source>
__device__ __noinline__ void ReduceBox(const Region& region, const Operand& destination, int32_t num_sources, const Source& source,
                          int64_t item, const Aggregator& aggregator) {
  bool gapless = region.InnerStride(destination) == 1;
  for (int32_t s = 0; gapless && s < num_sources; ++s) gapless = region.InnerStride(source(s)) == 1;
  const Pieces pieces(region, destination, item, gapless);
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < pieces.count(); i += blockDim.x) {
    const Piece piece = pieces.At(i);
    bool vector = piece.bytes == kPieceBytes && IsVector(piece.to);
    for (int32_t s = 0; vector && s < num_sources; ++s) vector = IsVector(pieces.From(piece, source(s)));
    const int64_t unit = vector ? kPieceBytes : item;
#pragma unroll 1
    for (int64_t at = 0; at < piece.bytes; at += unit) {
      Accumulator sum = {};
      uint4 next = LoadUnit(pieces.From(piece, source(0)) + at, unit);
#pragma unroll 1
      for (int32_t s = 0; s < num_sources; ++s) {
        const uint4 value = next;
        if (s + 1 < num_sources) next = LoadUnit(pieces.From(piece, source(s + 1)) + at, unit);
        aggregator.Add(value, s == 0, sum);
      }
      const uint4 result = aggregator.Result(sum);
      if (unit == kPieceBytes) {
        StoreData(reinterpret_cast<uint4*>(piece.to + at), result);
      } else {
        StoreElement(piece.to + at, result, unit);
      }
    }
  }
}

}  // namespace einsummable::cuda
