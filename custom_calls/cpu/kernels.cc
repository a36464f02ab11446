// Built once per instruction set (EINSUMMABLE_ISA names the variant), see kernels_dispatch.cc. To keep code
// of one variant out of the others, nothing of the standard library that is not inlined is used here.
#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "core/float8.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace einsummable::cpu::EINSUMMABLE_ISA {
namespace {

// Elements aggregated at a time: the accumulators stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// ---- One row: a run of elements along the innermost dimension -------------------------------------------

struct Row {
  char* destination;
  int64_t stride;  // of the destination, in elements
  const char* const* sources;
  const int64_t* source_strides;
  int64_t num_sources;
  int64_t count;
};

using RowFn = void (*)(const Row& row, const Float8* float8);

template <typename Element, typename Op>
void Combine(typename Element::Value* __restrict values, const typename Element::Stored* __restrict source,
             int64_t stride, int64_t count) {
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) values[i] = Op::Of(values[i], Element::Load(source[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) values[i] = Op::Of(values[i], Element::Load(source[i * stride]));
  }
}

template <typename Element>
void Load(typename Element::Value* __restrict values, const typename Element::Stored* __restrict source,
          int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = Element::Load(source[i * stride]);
}

// Two and more contiguous sources of which the first two are read together.
template <typename Element, typename Op>
void CombineTwo(typename Element::Value* __restrict values, const typename Element::Stored* __restrict first,
                const typename Element::Stored* __restrict second, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = Op::Of(Element::Load(first[i]), Element::Load(second[i]));
}

template <typename Element, typename Op>
void CombineThree(typename Element::Value* __restrict values, const typename Element::Stored* __restrict first,
                  const typename Element::Stored* __restrict second, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = Op::Of(Op::Of(values[i], Element::Load(first[i])), Element::Load(second[i]));
  }
}

template <typename Element, typename Op>
void ReduceRow(const Row& row, const Float8*) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  auto source = [&](int64_t s, int64_t start) {
    return reinterpret_cast<const Stored*>(row.sources[s]) + start * row.source_strides[s];
  };
  auto contiguous = [&](int64_t s) { return row.source_strides[s] == 1; };
  Value values[kBlock];
  for (int64_t start = 0; start < row.count; start += kBlock) {
    const int64_t count = row.count - start < kBlock ? row.count - start : kBlock;
    int64_t s = 0;
    if (contiguous(0) && contiguous(1)) {
      CombineTwo<Element, Op>(values, source(0, start), source(1, start), count);
      s = 2;
    } else {
      Load<Element>(values, source(0, start), row.source_strides[0], count);
      s = 1;
    }
    while (s < row.num_sources) {
      if (s + 1 < row.num_sources && contiguous(s) && contiguous(s + 1)) {
        CombineThree<Element, Op>(values, source(s, start), source(s + 1, start), count);
        s += 2;
      } else {
        Combine<Element, Op>(values, source(s, start), row.source_strides[s], count);
        s += 1;
      }
    }
    Stored* destination = reinterpret_cast<Stored*>(row.destination) + start * row.stride;
    if (row.stride == 1) {
      for (int64_t i = 0; i < count; ++i) destination[i] = Element::Round(values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) destination[i * row.stride] = Element::Round(values[i]);
    }
  }
}

template <typename Op>
void ReduceFloat8Row(const Row& row, const Float8* float8) {
  uint8_t* destination = reinterpret_cast<uint8_t*>(row.destination);
  for (int64_t i = 0; i < row.count; ++i) {
    float value = float8->Load(static_cast<uint8_t>(row.sources[0][i * row.source_strides[0]]));
    for (int64_t s = 1; s < row.num_sources; ++s) {
      value = Op::Of(value, float8->Load(static_cast<uint8_t>(row.sources[s][i * row.source_strides[s]])));
    }
    destination[i * row.stride] = float8->Round(value);
  }
}

struct Item16 {
  uint64_t low, high;
};

template <typename Item>
void CopyRow(const Row& row, const Float8*) {
  const int64_t source_stride = row.source_strides[0];
  if (row.stride == 1 && source_stride == 1) {
    std::memcpy(row.destination, row.sources[0], row.count * sizeof(Item));
    return;
  }
  Item* __restrict destination = reinterpret_cast<Item*>(row.destination);
  const Item* __restrict source = reinterpret_cast<const Item*>(row.sources[0]);
  for (int64_t i = 0; i < row.count; ++i) destination[i * row.stride] = source[i * source_stride];
}

// ---- The row function of a move -------------------------------------------------------------------------

RowFn CopyFn(int64_t item_size) {
  switch (item_size) {
    case 1: return CopyRow<uint8_t>;
    case 2: return CopyRow<uint16_t>;
    case 4: return CopyRow<uint32_t>;
    case 8: return CopyRow<uint64_t>;
    default: return CopyRow<Item16>;
  }
}

template <typename Element>
RowFn FloatFn(Monoid monoid) {
  switch (monoid) {
    case Monoid::kSum: return ReduceRow<Element, Sum>;
    case Monoid::kProd: return ReduceRow<Element, Prod>;
    case Monoid::kMax: return ReduceRow<Element, Max>;
    default: return ReduceRow<Element, Min>;
  }
}

template <typename T>
RowFn IntegerFn(Monoid monoid) {
  switch (monoid) {
    case Monoid::kAnd: return ReduceRow<Plain<T>, And>;
    case Monoid::kOr: return ReduceRow<Plain<T>, Or>;
    default: return FloatFn<Plain<T>>(monoid);
  }
}

RowFn BooleanFn(Monoid monoid) {
  const bool any = monoid == Monoid::kOr || monoid == Monoid::kMax;
  return any ? ReduceRow<Plain<uint8_t>, Or> : ReduceRow<Plain<uint8_t>, And>;
}

RowFn Float8Fn(Monoid monoid) {
  switch (monoid) {
    case Monoid::kSum: return ReduceFloat8Row<Sum>;
    case Monoid::kProd: return ReduceFloat8Row<Prod>;
    case Monoid::kMax: return ReduceFloat8Row<Max>;
    default: return ReduceFloat8Row<Min>;
  }
}

RowFn ReduceFn(Monoid monoid, DType dtype) {
  switch (dtype) {
    case DType::kPred: return BooleanFn(monoid);
    case DType::kS8: return IntegerFn<int8_t>(monoid);
    case DType::kS16: return IntegerFn<int16_t>(monoid);
    case DType::kS32: return IntegerFn<int32_t>(monoid);
    case DType::kS64: return IntegerFn<int64_t>(monoid);
    case DType::kU8: return IntegerFn<uint8_t>(monoid);
    case DType::kU16: return IntegerFn<uint16_t>(monoid);
    case DType::kU32: return IntegerFn<uint32_t>(monoid);
    case DType::kU64: return IntegerFn<uint64_t>(monoid);
    case DType::kF16: return FloatFn<Float16>(monoid);
    case DType::kBF16: return FloatFn<BFloat16>(monoid);
    case DType::kF32: return FloatFn<Plain<float>>(monoid);
    case DType::kF64: return FloatFn<Plain<double>>(monoid);
    case DType::kC64: return FloatFn<Plain<ComplexOf<float>>>(monoid);
    case DType::kC128: return FloatFn<Plain<ComplexOf<double>>>(monoid);
    default: return Float8Fn(monoid);
  }
}

// ---- A contiguous copy that leaves the caches alone -----------------------------------------------------

#if defined(__AVX__)
constexpr int64_t kVector = 32;
inline void StreamVector(char* to, const char* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void StreamFence() { _mm_sfence(); }
#elif defined(__SSE2__)
constexpr int64_t kVector = 16;
inline void StreamVector(char* to, const char* from) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void StreamFence() { _mm_sfence(); }
#else
constexpr int64_t kVector = 16;
inline void StreamVector(char* to, const char* from) { std::memcpy(to, from, kVector); }
inline void StreamFence() {}
#endif

void StreamBytes(char* to, const char* from, int64_t bytes) {
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (kVector - 1));
  if (bytes < 4 * kVector + head) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  int64_t done = head;
  for (; done + 4 * kVector <= bytes; done += 4 * kVector) {
    for (int64_t i = 0; i < 4; ++i) StreamVector(to + done + i * kVector, from + done + i * kVector);
  }
  std::memcpy(to + done, from + done, bytes - done);
}

void CopyBytes(char* to, const char* from, int64_t bytes, bool stream) {
  if (!stream) {
    std::memcpy(to, from, bytes);
    return;
  }
  StreamBytes(to, from, bytes);
  StreamFence();
}

// ---- Walking the box ------------------------------------------------------------------------------------

// Rows of a strided box in row-major order: the index of the current row and the offset of each operand.
class RowWalk {
 public:
  RowWalk(const BoundMove& move, int64_t first_row) : move_(move) {
    for (int32_t dim = move.rank - 2; dim >= 0; --dim) {
      index_[dim] = first_row % move.extents[dim];
      first_row /= move.extents[dim];
    }
  }

  int64_t Offset(const int64_t* strides) const {
    int64_t offset = 0;
    for (int32_t dim = 0; dim < move_.rank - 1; ++dim) offset += index_[dim] * strides[dim];
    return offset;
  }

  void Next() {
    for (int32_t dim = move_.rank - 2; dim >= 0; --dim) {
      if (++index_[dim] < move_.extents[dim]) return;
      index_[dim] = 0;
    }
  }

 private:
  const BoundMove& move_;
  int64_t index_[kMaxRank];
};

constexpr int64_t kMaxStackSources = 256;

void RunRows(const BoundMove& move, int64_t begin, int64_t end, bool stream, const char** sources,
             int64_t* source_strides) {
  const int64_t inner = move.rank == 0 ? 1 : move.extents[move.rank - 1];
  const int64_t item = ItemSize(move.dtype);
  const bool copy = move.monoid == Monoid::kCopy;
  const RowFn fn = copy ? CopyFn(item) : ReduceFn(move.monoid, move.dtype);
  const Float8* float8 = copy ? nullptr : Float8Table(move.dtype);
  auto inner_stride = [&](const int64_t* strides) { return move.rank == 0 ? 1 : strides[move.rank - 1]; };
  const int64_t stride = inner_stride(move.destination_strides);
  for (int64_t s = 0; s < move.num_sources; ++s) source_strides[s] = inner_stride(move.source_strides[s]);
  stream = stream && copy && stride == 1 && source_strides[0] == 1;
  RowWalk walk(move, begin / inner);
  for (int64_t position = begin; position < end; walk.Next()) {
    const int64_t column = position % inner;
    const int64_t count = inner - column < end - position ? inner - column : end - position;
    char* destination = move.destination + (walk.Offset(move.destination_strides) + column * stride) * item;
    for (int64_t s = 0; s < move.num_sources; ++s) {
      sources[s] = move.sources[s] + (walk.Offset(move.source_strides[s]) + column * source_strides[s]) * item;
    }
    const Row row = {destination, stride, sources, source_strides, move.num_sources, count};
    if (stream) {
      StreamBytes(row.destination, row.sources[0], row.count * item);
    } else {
      fn(row, float8);
    }
    position += count;
  }
  if (stream) StreamFence();
}

}  // namespace

void Run(const BoundMove& move, int64_t begin, int64_t end, bool stream) {
  if (move.contiguous) {
    const int64_t item = ItemSize(move.dtype);
    CopyBytes(move.destination + begin * item, move.sources[0] + begin * item, (end - begin) * item, stream);
    return;
  }
  if (move.num_sources <= kMaxStackSources) {
    const char* sources[kMaxStackSources];
    int64_t strides[kMaxStackSources];
    RunRows(move, begin, end, stream, sources, strides);
    return;
  }
  const char** sources = new const char*[move.num_sources];
  int64_t* strides = new int64_t[move.num_sources];
  RunRows(move, begin, end, stream, sources, strides);
  delete[] strides;
  delete[] sources;
}

}  // namespace einsummable::cpu::EINSUMMABLE_ISA
