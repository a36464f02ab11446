// How entry points for ctypes report what went wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#define EINSUMMABLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace einsummable::cuda {

inline void WriteMessage(const std::string& text, char* message, int64_t capacity) {
  if (capacity <= 0) return;
  const size_t size = std::min(text.size(), static_cast<size_t>(capacity - 1));
  std::memcpy(message, text.data(), size);
  message[size] = '\0';
}

// What `use` returns, or -1 with a message for what it throws.
template <typename Use>
auto Guarded(char* message, int64_t capacity, const Use& use) -> decltype(use()) {
  try {
    return use();
  } catch (const std::exception& error) {
    WriteMessage(error.what(), message, capacity);
    return -1;
  }
}

}  // namespace einsummable::cuda
