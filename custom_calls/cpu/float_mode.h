// The processor's treatment of denormal floats while a scope is open.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace einsummable::cpu {

enum class Denormals { kKeep, kFlush };

// XLA runs its own code with denormals flushed to zero. The kernels keep them (a copy or a sum must not depend
// on which thread runs it), and XLA's continuations get back the mode they expect.
class FloatMode {
 public:
  explicit FloatMode(Denormals denormals) : saved_(Get()) {
    const uint64_t mode = denormals == Denormals::kFlush ? saved_ | kFlushBits : saved_ & ~kFlushBits;
    if (mode != saved_) Set(mode);
    changed_ = mode != saved_;
  }
  ~FloatMode() {
    if (changed_) Set(saved_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlushBits = 0x8040;  // flush to zero, denormals are zero
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushBits = uint64_t{1} << 24;
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kFlushBits = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif

  uint64_t saved_;
  bool changed_;
};

}  // namespace einsummable::cpu
