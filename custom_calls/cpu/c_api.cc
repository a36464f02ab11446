// What Python calls through ctypes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <variant>

#include "core/program.h"
#include "cpu/counters.h"
#include "cpu/engine.h"

#define EINSUMMABLE_EXPORT extern "C" __attribute__((visibility("default")))

// Decodes a program. Returns 0 if it is sound, otherwise -1 with what is wrong in `message`.
EINSUMMABLE_EXPORT int EinsummableValidate(const int64_t* data, int64_t length, char* message, int64_t capacity) {
  const auto decoded = einsummable::Decode(data, static_cast<size_t>(length));
  const auto* problem = std::get_if<std::string>(&decoded);
  if (problem == nullptr) return 0;
  if (capacity > 0) {
    const size_t size = std::min(problem->size(), static_cast<size_t>(capacity - 1));
    std::memcpy(message, problem->data(), size);
    message[size] = '\0';
  }
  return -1;
}

// Writes up to `capacity` rows (exchange id, rank, calls, bytes received); returns how many rows there are.
EINSUMMABLE_EXPORT int64_t EinsummableCounters(int64_t* rows, int64_t capacity) {
  const auto values = einsummable::cpu::ReadCounters();
  const int64_t count = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < std::min(count, capacity); ++i) {
    const auto& value = values[i];
    const int64_t row[] = {value.exchange_id, value.rank, value.calls, value.bytes_received};
    std::copy(row, row + 4, rows + 4 * i);
  }
  return count;
}

EINSUMMABLE_EXPORT void EinsummableResetCounters() { einsummable::cpu::ResetCounters(); }

EINSUMMABLE_EXPORT void EinsummableSetTimeout(double timeout_s) {
  einsummable::cpu::Engine::Get().set_timeout_s(timeout_s);
}

EINSUMMABLE_EXPORT double EinsummableTimeout() { return einsummable::cpu::Engine::Get().timeout_s(); }

EINSUMMABLE_EXPORT int64_t EinsummableOpenExchanges() { return einsummable::cpu::Engine::Get().num_open(); }

// Ends the exchanges of a launch with `message`: a callback has failed that it needs.
EINSUMMABLE_EXPORT void EinsummableFailRun(int64_t run_id, const char* message) {
  using einsummable::cpu::Failure;
  einsummable::cpu::Engine::Get().FailRun(run_id, Failure{Failure::Kind::kHostCall, message});
}
