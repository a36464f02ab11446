// The exchange as an XLA custom call on GPUs, and the call that makes its tokens: they decode the call frame, nothing else.
//
// Operands, results and attributes are those of the CPU's handlers (`cpu/ffi_handler.cc`), and for the exchange one attribute
// more: `locations`, for each rank its process and its device as CUDA numbers it there. Which rank a device runs has to
// be known on the host, where the value of the rank operand is not; the kernel compares the two.
//
// Stages: `Instantiate` decodes. `Initialize` runs before every execution, outside of any capture: the first time it opens the
// channel, which allocates. `Execute` enqueues one kernel; captured into a CUDA graph, that kernel may be replayed.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/call_frame.h"
#include "cuda/check.h"
#include "cuda/engine.h"
#include "cuda/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace einsummable::cuda {
namespace {

// What XLA keeps per instruction of an executable.
struct InstructionState {
  static ffi::TypeId id;
  ChannelRequest request;
  bool shared = false;  // all ranks run this very instruction
  bool has_token = false;
  std::mutex mutex;
  std::shared_ptr<Channel> channel;  // once it is open

  std::string Title() const { return TitleOf(request.exchange_id, request.name); }
};

ffi::TypeId InstructionState::id = XLA_FFI_UNKNOWN_TYPE_ID;

ffi::ErrorOr<std::unique_ptr<InstructionState>> Instantiate(ffi::Span<const int64_t> encoding, int64_t exchange_id,
                                                            std::string_view name, int64_t shared, int64_t token,
                                                            ffi::Span<const int64_t> locations) {
  auto state = std::make_unique<InstructionState>();
  state->request.exchange_id = exchange_id;
  state->request.name = std::string(name);
  auto decoded = Decode(encoding.begin(), encoding.size());
  if (const auto* message = std::get_if<std::string>(&decoded)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(state->Title() + ": " + *message));
  }
  state->request.program = std::move(std::get<0>(decoded));
  if (locations.size() != 2 * static_cast<size_t>(state->request.program->num_devices)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        state->Title() + ": " + std::to_string(locations.size()) + " numbers in the attribute locations, expected two " +
        "for each of " + std::to_string(state->request.program->num_devices) + " devices"));
  }
  for (size_t i = 0; i < locations.size(); i += 2) {
    state->request.locations.push_back({locations.begin()[i], locations.begin()[i + 1]});
  }
  state->shared = shared != 0;
  state->has_token = token != 0;
  return state;
}

struct Call {
  InstructionState& state;
  int32_t rank;
  std::optional<TokenBuffers> token;
  std::vector<void*> buffers;
};

// The call of the device `ordinal`; throws std::invalid_argument if something does not fit.
Call Decoded(InstructionState& state, int32_t ordinal, ffi::RemainingArgs& args, ffi::RemainingRets& rets) {
  const auto& locations = state.request.locations;
  const Location here = {Engine::Get().process(), ordinal};
  Call call = {state, 0, std::nullopt, {}};
  while (call.rank < state.request.program->num_devices && !(locations[call.rank] == here)) ++call.rank;
  if (call.rank == state.request.program->num_devices) {
    throw std::invalid_argument("GPU " + std::to_string(ordinal) + " of process " + std::to_string(here.process) +
                                " is none of the devices that the function was traced for");
  }
  const CallFrame frame = {args, rets};
  if (state.has_token) {
    call.token = TokenOf(frame);
    if (!call.token) throw std::invalid_argument("the first operand and result must be the token, s32[1]");
  }
  const auto problem =
      CollectBuffers(*state.request.program, call.rank, state.has_token, frame, call.buffers);
  if (problem) throw std::invalid_argument("on device rank " + std::to_string(call.rank) + ": " + *problem);
  return call;
}

std::shared_ptr<Channel> OpenChannel(InstructionState& state) {
  std::lock_guard lock(state.mutex);
  if (state.channel == nullptr) {
    Engine& engine = Engine::Get();
    const auto& locations = state.request.locations;
    bool local = true;
    for (const Location& location : locations) local = local && location.process == engine.process();
    state.channel = !local         ? engine.FindDistributed(state.request)
                    : state.shared ? engine.Open(state.request)
                                   : engine.OpenShared(state.request);
  }
  return state.channel;
}

// Runs `use`, and makes errors of what it throws.
template <typename Use>
ffi::Error Guarded(InstructionState* state, const Use& use) {
  try {
    if (const auto failure = Engine::Get().Failure()) return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *failure);
    use();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(state->Title() + ": " + error.what());
  } catch (const CudaError& error) {
    return ffi::Error::Internal(state->Title() + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, state->Title() + ": no memory on the host");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(state->Title() + ": " + error.what());
  }
}

ffi::Error Initialize(InstructionState* state, int32_t ordinal, ffi::AnyBuffer, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, ffi::Dictionary) {
  return Guarded(state, [&] {
    const Call call = Decoded(*state, ordinal, args, rets);
    const std::shared_ptr<Channel> channel = OpenChannel(*state);
    if (!channel->Participates(call.rank)) return;
    const DeviceScope scope(ordinal);
    std::vector<Device*> others;
    for (int32_t rank = 0; rank < state->request.program->num_devices; ++rank) others.push_back(channel->device(rank));
    for (const void* buffer : call.buffers) {
      if (buffer != nullptr) Engine::Get().reach().Ensure(*channel->device(call.rank), buffer, others);
    }
  });
}

void HandTokenOn(const TokenBuffers& token, cudaStream_t stream) {
  if (token.in == token.out) return;
  EINSUMMABLE_CHECK_CUDA(cudaMemcpyAsync(token.out, token.in, sizeof(*token.in), cudaMemcpyDeviceToDevice, stream));
}

ffi::Error Execute(InstructionState* state, cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer rank_buffer,
                   ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  return Guarded(state, [&] {
    const Call call = Decoded(*state, ordinal, args, rets);
    const DeviceScope scope(ordinal);
    const std::shared_ptr<Channel> channel = OpenChannel(*state);
    if (!channel->Participates(call.rank)) {
      if (call.token) HandTokenOn(*call.token, stream);
      return;
    }
    Operands operands;
    operands.rank = static_cast<const int32_t*>(rank_buffer.untyped_data());
    if (call.token) {
      operands.token_in = call.token->in;
      operands.token_out = call.token->out;
    }
    LaunchRank(channel->LaunchOf(call.rank, operands), call.buffers, /*cooperative=*/true, stream);
  });
}

// On a GPU the token's value tells nothing apart; only that it passes through every call matters.
ffi::Error MakeToken(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs,
                     ffi::Result<ffi::BufferR1<ffi::S32>> token) {
  if (token->element_count() != 1) return ffi::Error::InvalidArgument("the token must be s32[1]");
  try {
    const DeviceScope scope(ordinal);
    LaunchWrite(token->typed_data(), 1, stream);
  } catch (const CudaError& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_TypeInfo instruction_state_info = ffi::MakeTypeInfo<InstructionState>();

auto ExchangeBinding() {
  return ffi::Ffi::BindExecute()
      .Ctx<ffi::State<InstructionState>>()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace
}  // namespace einsummable::cuda

#define EINSUMMABLE_EXPORT extern "C" __attribute__((visibility("default")))

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableCudaExchangeInstantiate(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate()
                                   .Attr<ffi::Span<const int64_t>>("program")
                                   .Attr<int64_t>("exchange_id")
                                   .Attr<std::string_view>("name")
                                   .Attr<int64_t>("shared")
                                   .Attr<int64_t>("token")
                                   .Attr<ffi::Span<const int64_t>>("locations")
                                   .To(einsummable::cuda::Instantiate)
                                   .release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableCudaExchangeInitialize(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInitialize()
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

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableCudaExchangeExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = einsummable::cuda::ExchangeBinding()
                                   .To(einsummable::cuda::Execute, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

// The same call, but never captured into a CUDA graph.
EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableCudaExchangeExecuteUncaptured(XLA_FFI_CallFrame* frame) {
  static const auto* handler = einsummable::cuda::ExchangeBinding().To(einsummable::cuda::Execute).release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableCudaTokenExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .RemainingArgs()
                                   .Ret<ffi::BufferR1<ffi::S32>>()
                                   .To(einsummable::cuda::MakeToken, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT void* EinsummableCudaInstructionStateTypeId() { return &einsummable::cuda::InstructionState::id; }

EINSUMMABLE_EXPORT void* EinsummableCudaInstructionStateTypeInfo() {
  return &einsummable::cuda::instruction_state_info;
}
