// Element types as the kernels compute with them: how each is stored, how it is loaded and rounded, and how two are
// aggregated.
//
// Floats narrower than 32 bits are aggregated in float32 and rounded once. The conversions are free of
// branches, so that loops over them vectorise, and do not depend on the thread's denormal mode. All is inlined
// always: an out-of-line copy built for one instruction set could be linked into code built for another. All is
// constexpr: CUDA code may call it.
#pragma once

#include <bit>
#include <cstdint>

namespace einsummable {

// Elements that are computed with as they are stored.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  [[gnu::always_inline]] static constexpr Value Load(Stored x) { return x; }
  [[gnu::always_inline]] static constexpr Stored Round(Value x) { return x; }
};

template <typename Real>
struct ComplexOf {
  Real re, im;
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  [[gnu::always_inline]] static constexpr float Load(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
  [[gnu::always_inline]] static constexpr uint16_t Round(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  [[gnu::always_inline]] static constexpr float Load(uint16_t x) {
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude | 0x7f800000u;
    const float subnormal = std::bit_cast<float>(magnitude + 0x38800000u) - std::bit_cast<float>(0x38800000u);
    const uint32_t bits = magnitude >= 0x0f800000u   ? special
                          : magnitude < 0x00800000u ? std::bit_cast<uint32_t>(subnormal)
                                                    : normal;
    return std::bit_cast<float>(bits | (static_cast<uint32_t>(x & 0x8000u) << 16));
  }
  [[gnu::always_inline]] static constexpr uint16_t Round(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t rounded = magnitude >= 0x47800000u  ? special
                             : magnitude < 0x38800000u ? subnormal
                                                       : normal;
    return static_cast<uint16_t>(rounded | ((bits >> 16) & 0x8000u));
  }
};

// An 8-bit float format as a table of its values.
struct Float8 {
  float values[256];
  int max_code;       // code of the largest finite value
  int overflow_code;  // what a larger magnitude rounds to: infinity or NaN
  int nan_code;
  bool has_sign;
  bool has_negative_zero;

  [[gnu::always_inline]] constexpr float Load(uint8_t code) const { return values[code]; }

  // Round to nearest, ties to the even code (upwards without a sign, as in ml_dtypes).
  [[gnu::always_inline]] constexpr uint8_t Round(float value) const {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 31;
    const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
    if (magnitude != magnitude) return static_cast<uint8_t>(nan_code);
    if (!has_sign && (sign != 0 || magnitude == 0.0f)) return static_cast<uint8_t>(nan_code);
    int low = 0, high = max_code;  // the largest code whose value is not above the magnitude
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (values[middle] <= magnitude) low = middle; else high = middle - 1;
    }
    const double step = low < max_code ? static_cast<double>(values[low + 1]) - values[low]
                        : has_sign     ? static_cast<double>(values[low]) - values[low - 1]
                                       : static_cast<double>(values[low]);
    const double over = static_cast<double>(magnitude) - values[low];
    int code = low;
    if (over * 2 > step || (over * 2 == step && ((low & 1) != 0 || !has_sign))) ++code;
    if (code > max_code) code = overflow_code;
    if (sign == 0 || code == nan_code || (code == 0 && !has_negative_zero)) return static_cast<uint8_t>(code);
    return static_cast<uint8_t>(code | 0x80);
  }
};

// ---- Aggregation of two values --------------------------------------------------------------------------

struct Sum {
  template <typename T>
  [[gnu::always_inline]] static constexpr T Of(T a, T b) { return static_cast<T>(a + b); }
  template <typename R>
  [[gnu::always_inline]] static constexpr ComplexOf<R> Of(ComplexOf<R> a, ComplexOf<R> b) {
    return {a.re + b.re, a.im + b.im};
  }
};

struct Prod {
  template <typename T>
  [[gnu::always_inline]] static constexpr T Of(T a, T b) { return static_cast<T>(a * b); }
  template <typename R>
  [[gnu::always_inline]] static constexpr ComplexOf<R> Of(ComplexOf<R> a, ComplexOf<R> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// NaN wins over any number. Complex numbers compare by real part, then by imaginary part, as in lax.
struct Max {
  template <typename T>
  [[gnu::always_inline]] static constexpr T Of(T a, T b) { return (a >= b) | (a != a) ? a : b; }
  template <typename R>
  [[gnu::always_inline]] static constexpr ComplexOf<R> Of(ComplexOf<R> a, ComplexOf<R> b) {
    return (a.re == b.re ? a.im > b.im : a.re > b.re) ? a : b;
  }
};

struct Min {
  template <typename T>
  [[gnu::always_inline]] static constexpr T Of(T a, T b) { return (a <= b) | (a != a) ? a : b; }
  template <typename R>
  [[gnu::always_inline]] static constexpr ComplexOf<R> Of(ComplexOf<R> a, ComplexOf<R> b) {
    return (a.re == b.re ? a.im < b.im : a.re < b.re) ? a : b;
  }
};

struct And {
  template <typename T>
  [[gnu::always_inline]] static constexpr T Of(T a, T b) { return static_cast<T>(a & b); }
};

struct Or {
  template <typename T>
  [[gnu::always_inline]] static constexpr T Of(T a, T b) { return static_cast<T>(a | b); }
};

}  // namespace einsummable
