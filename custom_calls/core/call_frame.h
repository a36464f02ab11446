// The buffers of a custom call, checked against the program that it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/program.h"
#include "xla/ffi/api/ffi.h"

namespace einsummable {

// Operands [token], inputs; results [token], outputs. The rank, which comes first, has been taken off.
struct CallFrame {
  xla::ffi::RemainingArgs& args;
  xla::ffi::RemainingRets& rets;
};

inline bool IsToken(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_type() == xla::ffi::S32 && buffer.element_count() == 1;
}

// The token as it comes in and goes out; nothing if the first operand or result is none.
struct TokenBuffers {
  const int32_t* in;
  int32_t* out;
};

inline std::optional<TokenBuffers> TokenOf(const CallFrame& frame) {
  if (frame.args.size() == 0 || frame.rets.size() == 0) return std::nullopt;
  const auto from = frame.args.get<xla::ffi::AnyBuffer>(0).value();
  const auto to = *frame.rets.get<xla::ffi::AnyBuffer>(0).value();
  if (!IsToken(from) || !IsToken(to)) return std::nullopt;
  return TokenBuffers{static_cast<const int32_t*>(from.untyped_data()), static_cast<int32_t*>(to.untyped_data())};
}

// What is wrong with one buffer of a call, or nothing.
inline std::optional<std::string> Mismatch(const char* kind, size_t index, const xla::ffi::AnyBuffer& buffer,
                                           int64_t size, const Program& program) {
  const auto count = static_cast<int64_t>(buffer.element_count());
  const auto dtype = static_cast<int64_t>(buffer.element_type());
  if (count == size && dtype == static_cast<int64_t>(program.dtype)) return std::nullopt;
  return std::string(kind) + " " + std::to_string(index) + " has " + std::to_string(count) +
         " elements of dtype code " + std::to_string(dtype) + ", the program wants " + std::to_string(size) +
         " of dtype code " + std::to_string(static_cast<int64_t>(program.dtype));
}

// Collects the inputs, then the outputs of `rank`, or says which does not fit the program.
template <typename Pointer>
std::optional<std::string> CollectBuffers(const Program& program, int64_t rank, bool has_token, const CallFrame& frame,
                                          std::vector<Pointer>& buffers) {
  const auto& inputs = program.sizes[rank][static_cast<int>(Space::kInput)];
  const auto& outputs = program.sizes[rank][static_cast<int>(Space::kOutput)];
  const size_t token = has_token ? 1 : 0;
  if (frame.args.size() != inputs.size() + token || frame.rets.size() != outputs.size() + token) {
    return "got " + std::to_string(frame.args.size()) + " operands and " + std::to_string(frame.rets.size()) +
           " results, the program wants " + std::to_string(inputs.size() + token) + " and " +
           std::to_string(outputs.size() + token);
  }
  buffers.reserve(inputs.size() + outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto buffer = frame.args.get<xla::ffi::AnyBuffer>(i + token).value();
    if (auto mismatch = Mismatch("input", i, buffer, inputs[i], program)) return mismatch;
    buffers.push_back(static_cast<Pointer>(buffer.untyped_data()));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto buffer = *frame.rets.get<xla::ffi::AnyBuffer>(i + token).value();
    if (auto mismatch = Mismatch("output", i, buffer, outputs[i], program)) return mismatch;
    buffers.push_back(static_cast<Pointer>(buffer.untyped_data()));
  }
  return std::nullopt;
}

}  // namespace einsummable
