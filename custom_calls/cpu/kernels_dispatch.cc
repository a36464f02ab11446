#include "cpu/kernels.h"

namespace einsummable::cpu {

namespace baseline {
void Run(const BoundMove& bound, int64_t begin, int64_t end, bool stream);
}
namespace x86_64_v3 {
void Run(const BoundMove& bound, int64_t begin, int64_t end, bool stream);
}

RunFn BestRun() {
#if defined(EINSUMMABLE_X86_64_V3)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    return x86_64_v3::Run;
  }
#endif
  return baseline::Run;
}

}  // namespace einsummable::cpu
