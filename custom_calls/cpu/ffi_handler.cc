// The exchange as an XLA custom call, and the calls that make its tokens and tell the launch: they decode the call
// frame, nothing else.
//
// Exchange: operands rank (s32 scalar), [token (s32, one element)], inputs; results [token], outputs; attributes
// program, exchange_id, name, shared, token.
// Token: any operands; one result, the token. Its value is a number that only this instruction gives.
// Run: no operands; one result, the run id as s32[2], low half first.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/call_frame.h"
#include "cpu/engine.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace einsummable::cpu {
namespace {

// What XLA keeps per instruction of an executable.
struct InstructionState {
  static ffi::TypeId id;
  std::shared_ptr<Exchange> exchange;
};

ffi::TypeId InstructionState::id = XLA_FFI_UNKNOWN_TYPE_ID;

// Tokens carry it as a 32-bit number, in which it may come round after two billion instructions.
int64_t NextInstance() {
  static std::atomic<int64_t> instances{0};
  return instances.fetch_add(1) % INT32_MAX + 1;
}

ffi::ErrorOr<std::unique_ptr<InstructionState>> Instantiate(ffi::Span<const int64_t> encoding, int64_t exchange_id,
                                                            std::string_view name, int64_t shared, int64_t token) {
  auto decoded = Decode(encoding.begin(), encoding.size());
  if (const auto* message = std::get_if<std::string>(&decoded)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("exchange " + std::to_string(exchange_id) + " (" +
                                                       std::string(name) + "): " + *message));
  }
  auto state = std::make_unique<InstructionState>();
  state->exchange = std::make_shared<Exchange>(std::move(std::get<0>(decoded)), exchange_id, std::string(name));
  state->exchange->instance = shared != 0 ? NextInstance() : 0;
  state->exchange->has_token = token != 0;
  return state;
}

// Hands the token on (a result must not be left undefined where XLA did not alias it); its value, or nothing if it is
// no token.
std::optional<int64_t> PassToken(const CallFrame& frame) {
  const std::optional<TokenBuffers> token = TokenOf(frame);
  if (!token) return std::nullopt;
  const int32_t value = *token->in;
  *token->out = value;
  return value;
}

class XlaCall : public RankCall {
 public:
  ffi::Future future() const { return ffi::Future(promise_); }

  void End() override {
    if (!failure) return promise_.SetAvailable();
    promise_.SetError(ffi::Error(CodeOf(failure->kind), failure->message));
  }

 private:
  static ffi::ErrorCode CodeOf(Failure::Kind kind) {
    switch (kind) {
      case Failure::Kind::kMissingRank: return ffi::ErrorCode::kDeadlineExceeded;
      case Failure::Kind::kInvalid: return ffi::ErrorCode::kInvalidArgument;
      case Failure::Kind::kHostCall: break;
    }
    return ffi::ErrorCode::kInternal;  // as XLA has it where a callback fails
  }

  ffi::Promise promise_;
};

ffi::Future Execute(InstructionState* state, ffi::RunId run_id, ffi::BufferR0<ffi::S32> rank_buffer,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  const std::shared_ptr<Exchange>& exchange = state->exchange;
  auto call = std::make_unique<XlaCall>();
  ffi::Future future = call->future();
  const CallFrame frame = {args, rets};
  const int64_t rank = *rank_buffer.typed_data();
  std::optional<std::string> problem;
  const std::optional<int64_t> token = exchange->has_token ? PassToken(frame) : 0;
  if (!token) {
    problem = "the first operand and result must be the token, s32[1]";
  } else if (rank < 0 || rank >= exchange->program->num_devices) {
    problem = "rank is " + std::to_string(rank) + ", the program is for " +
              std::to_string(exchange->program->num_devices) + " devices";
  } else {
    problem = CollectBuffers(*exchange->program, rank, exchange->has_token, frame, call->buffers);
  }
  if (problem) {
    call->failure = {Failure::Kind::kInvalid,
                     exchange->Title() + " on device rank " + std::to_string(rank) + ": " + *problem};
    Engine::Get().FailRun(run_id.run_id, *call->failure);
    call->End();
    return future;
  }
  const int64_t instance = exchange->instance != 0 ? exchange->instance : *token;
  Engine::Get().Call(exchange, {run_id.run_id, instance}, rank, std::move(call));
  return future;
}

struct TokenState {
  static ffi::TypeId id;
  int32_t number;
};

ffi::TypeId TokenState::id = XLA_FFI_UNKNOWN_TYPE_ID;

ffi::ErrorOr<std::unique_ptr<TokenState>> InstantiateToken(ffi::Dictionary) {
  return std::make_unique<TokenState>(TokenState{static_cast<int32_t>(NextInstance())});
}

ffi::Error MakeToken(TokenState* state, ffi::RemainingArgs, ffi::Result<ffi::BufferR1<ffi::S32>> token) {
  if (token->element_count() != 1) return ffi::Error::InvalidArgument("the token must be s32[1]");
  *token->typed_data() = state->number;
  return ffi::Error::Success();
}

ffi::Error TellRun(ffi::RunId run_id, ffi::Result<ffi::BufferR1<ffi::S32>> run) {
  if (run->element_count() != 2) return ffi::Error::InvalidArgument("the run id must be s32[2]");
  std::memcpy(run->typed_data(), &run_id.run_id, sizeof(int64_t));
  return ffi::Error::Success();
}

XLA_FFI_TypeInfo token_state_info = ffi::MakeTypeInfo<TokenState>();

XLA_FFI_TypeInfo instruction_state_info = ffi::MakeTypeInfo<InstructionState>();

}  // namespace
}  // namespace einsummable::cpu

#define EINSUMMABLE_EXPORT extern "C" __attribute__((visibility("default")))

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableExchangeInstantiate(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindInstantiate()
                                   .Attr<ffi::Span<const int64_t>>("program")
                                   .Attr<int64_t>("exchange_id")
                                   .Attr<std::string_view>("name")
                                   .Attr<int64_t>("shared")
                                   .Attr<int64_t>("token")
                                   .To(einsummable::cpu::Instantiate)
                                   .release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableExchangeExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::State<einsummable::cpu::InstructionState>>()
                                   .Ctx<ffi::RunId>()
                                   .Arg<ffi::BufferR0<ffi::S32>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .To(einsummable::cpu::Execute)
                                   .release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableTokenInstantiate(XLA_FFI_CallFrame* frame) {
  static const auto* handler =
      ffi::Ffi::BindInstantiate().Attrs().To(einsummable::cpu::InstantiateToken).release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableTokenExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::State<einsummable::cpu::TokenState>>()
                                   .RemainingArgs()
                                   .Ret<ffi::BufferR1<ffi::S32>>()
                                   .To(einsummable::cpu::MakeToken)
                                   .release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT XLA_FFI_Error* EinsummableRunExecute(XLA_FFI_CallFrame* frame) {
  static const auto* handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::RunId>()
                                   .Ret<ffi::BufferR1<ffi::S32>>()
                                   .To(einsummable::cpu::TellRun)
                                   .release();
  return handler->Call(frame);
}

EINSUMMABLE_EXPORT void* EinsummableTokenStateTypeId() { return &einsummable::cpu::TokenState::id; }

EINSUMMABLE_EXPORT void* EinsummableTokenStateTypeInfo() { return &einsummable::cpu::token_state_info; }

EINSUMMABLE_EXPORT void* EinsummableInstructionStateTypeId() { return &einsummable::cpu::InstructionState::id; }

EINSUMMABLE_EXPORT void* EinsummableInstructionStateTypeInfo() { return &einsummable::cpu::instruction_state_info; }
