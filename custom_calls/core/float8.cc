#include "core/float8.h"

#include <cmath>
#include <limits>

namespace einsummable {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// How the codes of the largest exponent are used.
enum class Special {
  kIeee,      // infinity and NaN, as in IEEE 754
  kFinite,    // no infinity; only the all-ones code is NaN
  kUnsigned0  // no infinity; the code of negative zero is the only NaN
};

Float8 Signed(int mantissa_bits, int bias, Special special) {
  Float8 table{};
  table.has_sign = true;
  table.has_negative_zero = special != Special::kUnsigned0;
  const int infinity = ((1 << (7 - mantissa_bits)) - 1) << mantissa_bits;
  table.max_code = special == Special::kIeee ? infinity - 1 : special == Special::kFinite ? 0x7e : 0x7f;
  table.nan_code = special == Special::kIeee ? infinity + (1 << (mantissa_bits - 1))
                   : special == Special::kFinite ? 0x7f : 0x80;
  table.overflow_code = special == Special::kIeee ? infinity : table.nan_code;
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const int implicit = exponent == 0 ? 0 : 1 << mantissa_bits;
    const float value = std::ldexp(static_cast<float>(implicit + mantissa),
                                   (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
    table.values[code] = code <= table.max_code ? value : code == infinity && special == Special::kIeee ? kInf : kNan;
    table.values[code | 0x80] = -table.values[code];
  }
  if (special == Special::kUnsigned0) table.values[0x80] = kNan;
  return table;
}

// Exponent only: no sign, no zero, no infinity.
Float8 Scale() {
  Float8 table{};
  table.max_code = 254;
  table.nan_code = table.overflow_code = 255;
  for (int code = 0; code < 255; ++code) table.values[code] = std::ldexp(1.0f, code - 127);
  table.values[255] = kNan;
  return table;
}

}  // namespace

const Float8* Float8Table(DType dtype) {
  static const Float8 e5m2 = Signed(2, 15, Special::kIeee);
  static const Float8 e4m3 = Signed(3, 7, Special::kIeee);
  static const Float8 e3m4 = Signed(4, 3, Special::kIeee);
  static const Float8 e4m3fn = Signed(3, 7, Special::kFinite);
  static const Float8 e4m3b11fnuz = Signed(3, 11, Special::kUnsigned0);
  static const Float8 e4m3fnuz = Signed(3, 8, Special::kUnsigned0);
  static const Float8 e5m2fnuz = Signed(2, 16, Special::kUnsigned0);
  static const Float8 e8m0fnu = Scale();
  switch (dtype) {
    case DType::kF8E5M2: return &e5m2;
    case DType::kF8E4M3: return &e4m3;
    case DType::kF8E3M4: return &e3m4;
    case DType::kF8E4M3FN: return &e4m3fn;
    case DType::kF8E4M3B11FNUZ: return &e4m3b11fnuz;
    case DType::kF8E4M3FNUZ: return &e4m3fnuz;
    case DType::kF8E5M2FNUZ: return &e5m2fnuz;
    case DType::kF8E8M0FNU: return &e8m0fnu;
    default: return nullptr;
  }
}

}  // namespace einsummable
