// Aggregation of 16 bytes at a time: the element types and operations of `core/element.h`, chosen at run time.
//
// Type and monoid are the same for all threads, so that choosing costs uniform branches and no more; a template for each
// pair would take minutes to compile.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "core/program.h"
#include "cuda/rank_view.h"

namespace einsummable::cuda {

// What of the elements of 16 bytes has been aggregated so far, in the type that it is computed in: 16 floats at most.
struct Accumulator {
  uint32_t words[16];
};

namespace aggregate {

template <typename Element>
struct Floats {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;

  __device__ Value Load(Stored x) const { return Element::Load(x); }
  __device__ Stored Store(Value x) const { return Element::Round(x); }

  __device__ Value Combine(Monoid monoid, Value a, Value b) const {
    switch (monoid) {
      case Monoid::kSum: return Sum::Of(a, b);
      case Monoid::kProd: return Prod::Of(a, b);
      case Monoid::kMax: return Max::Of(a, b);
      default: return Min::Of(a, b);
    }
  }
};

struct Floats8 {
  using Stored = uint8_t;
  using Value = float;

  const Float8* table;

  __device__ Value Load(Stored x) const { return table->Load(x); }
  __device__ Stored Store(Value x) const { return table->Round(x); }
  __device__ Value Combine(Monoid monoid, Value a, Value b) const {
    return Floats<Plain<float>>().Combine(monoid, a, b);
  }
};

// Signed and unsigned integers are both held as unsigned ones, so that sums wrap. `sign` is the sign bit of signed ones:
// flipping it orders them as unsigned ones are.
template <typename Unsigned>
struct Integers {
  using Stored = Unsigned;
  using Value = Unsigned;

  Unsigned sign;

  __device__ explicit Integers(bool is_signed)
      : sign(static_cast<Unsigned>(uint64_t{is_signed} << (8 * sizeof(Unsigned) - 1))) {}

  __device__ Value Load(Stored x) const { return x; }
  __device__ Stored Store(Value x) const { return x; }

  __device__ Value Combine(Monoid monoid, Value a, Value b) const {
    switch (monoid) {
      case Monoid::kSum: return static_cast<Unsigned>(a + b);
      // Not in `int`, which the product of two 16-bit numbers would overflow.
      case Monoid::kProd: return static_cast<Unsigned>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      case Monoid::kMax: return static_cast<Unsigned>(a ^ sign) >= static_cast<Unsigned>(b ^ sign) ? a : b;
      case Monoid::kMin: return static_cast<Unsigned>(a ^ sign) <= static_cast<Unsigned>(b ^ sign) ? a : b;
      case Monoid::kAnd: return static_cast<Unsigned>(a & b);
      default: return static_cast<Unsigned>(a | b);
    }
  }
};

template <typename Ops>
__device__ __forceinline__ void Fold(const Ops& ops, Monoid monoid, const uint4& more, Accumulator& sum) {
  constexpr int kCount = sizeof(uint4) / sizeof(typename Ops::Stored);
  typename Ops::Stored stored[kCount];
  typename Ops::Value values[kCount];
  static_assert(sizeof(values) <= sizeof(sum));
  memcpy(stored, &more, sizeof(stored));
  memcpy(values, &sum, sizeof(values));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const typename Ops::Value value = ops.Load(stored[i]);
    values[i] = monoid == Monoid::kCopy ? value : ops.Combine(monoid, values[i], value);
  }
  memcpy(&sum, values, sizeof(values));
}

template <typename Ops>
__device__ __forceinline__ void Finish(const Ops& ops, const Accumulator& sum, uint4& result) {
  constexpr int kCount = sizeof(uint4) / sizeof(typename Ops::Stored);
  typename Ops::Stored stored[kCount];
  typename Ops::Value values[kCount];
  memcpy(values, &sum, sizeof(values));
#pragma unroll
  for (int i = 0; i < kCount; ++i) stored[i] = ops.Store(values[i]);
  memcpy(&result, stored, sizeof(stored));
}

}  // namespace aggregate

// Sums and other aggregates of elements of one type.
class Aggregator {
 public:
  // `tables`: of the 8-bit floats.
  __device__ Aggregator(DType dtype, Monoid monoid, const Float8* tables)
      : dtype_(dtype), monoid_(monoid), table_(tables + Float8Index(static_cast<int32_t>(dtype))) {
    if (dtype != DType::kPred) return;
    const bool any = monoid == Monoid::kOr || monoid == Monoid::kMax;
    monoid_ = any ? Monoid::kOr : Monoid::kAnd;
  }

  // Aggregates the elements of 16 bytes into `sum`, which the first of them begins.
  __device__ __forceinline__ void Add(const uint4& more, bool first, Accumulator& sum) const {
    const Monoid monoid = first ? Monoid::kCopy : monoid_;
    Dispatch([&](const auto& ops) { aggregate::Fold(ops, monoid, more, sum); });
  }

  __device__ __forceinline__ uint4 Result(const Accumulator& sum) const {
    uint4 result;
    Dispatch([&](const auto& ops) { aggregate::Finish(ops, sum, result); });
    return result;
  }

 private:
  template <typename Use>
  __device__ __forceinline__ void Dispatch(const Use& use) const {
    switch (dtype_) {
      case DType::kPred: return use(aggregate::Integers<uint8_t>(false));
      case DType::kS8: case DType::kU8: return use(aggregate::Integers<uint8_t>(dtype_ == DType::kS8));
      case DType::kS16: case DType::kU16: return use(aggregate::Integers<uint16_t>(dtype_ == DType::kS16));
      case DType::kS32: case DType::kU32: return use(aggregate::Integers<uint32_t>(dtype_ == DType::kS32));
      case DType::kS64: case DType::kU64: return use(aggregate::Integers<uint64_t>(dtype_ == DType::kS64));
      case DType::kF16: return use(aggregate::Floats<Float16>());
      case DType::kBF16: return use(aggregate::Floats<BFloat16>());
      case DType::kF32: return use(aggregate::Floats<Plain<float>>());
      case DType::kF64: return use(aggregate::Floats<Plain<double>>());
      case DType::kC64: return use(aggregate::Floats<Plain<ComplexOf<float>>>());
      case DType::kC128: return use(aggregate::Floats<Plain<ComplexOf<double>>>());
      default: return use(aggregate::Floats8{table_});
    }
  }

  const DType dtype_;
  Monoid monoid_;
  const Float8* const table_;
};

}  // namespace einsummable::cuda
