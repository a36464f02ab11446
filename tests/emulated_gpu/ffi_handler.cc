// The engine's XLA handlers, for CPU devices of JAX that stand for emulated GPUs: XLA gives them no stream, so they get one
// that runs each kernel at once and waits for it.
#include <array>
#include <mutex>
#include <optional>

#include "cuda_runtime_api.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {

template <>
struct CtxDecoding<PlatformStream<emulated_gpu::Stream*>> {
  using Type = emulated_gpu::Stream*;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    static std::mutex mutex;
    static std::array<emulated_gpu::Stream*, 64> streams = {};
    const auto ordinal = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!ordinal) return std::nullopt;
    std::lock_guard lock(mutex);
    auto& stream = streams.at(static_cast<size_t>(*ordinal));
    if (stream == nullptr) stream = emulated_gpu::ImmediateStream();
    return stream;
  }
};

}  // namespace xla::ffi

#include "cuda/ffi_handler.cc"

// What the handler of the initialize stage does, where XLA has no such stage: as a call of its own.
EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableEmulatedInitialize(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::State<einsummable::cuda::InstructionState>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Arg<ffi::AnyBuffer>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .To(einsummable::cuda::Initialize)
                                   .release();
  return handler->Call(frame);
}
