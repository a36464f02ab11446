#include "cuda/engine.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <utility>

#include "cuda/check.h"

namespace einsummable::cuda {
namespace {

constexpr double kDefaultTimeoutS = 60;
constexpr auto kWatchInterval = std::chrono::milliseconds(100);

double TimeoutFromEnvironment() {
  const char* text = std::getenv("EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S");
  const double value = text == nullptr ? 0 : std::atof(text);
  return value > 0 ? value : kDefaultTimeoutS;
}

Reason ReasonOf(const Status& status) {
  return static_cast<Reason>(__atomic_load_n(&status.reason, __ATOMIC_ACQUIRE));
}

}  // namespace

std::string TitleOf(int64_t exchange_id, const std::string& name) {
  return "exchange " + std::to_string(exchange_id) + " (" + name + ")";
}

Engine& Engine::Get() {
  static Engine* const engine = new Engine;
  return *engine;
}

Engine::Engine() : timeout_s_(TimeoutFromEnvironment()) {}

void Engine::SetUp(int64_t process, const std::vector<int>& ordinals) {
  std::lock_guard lock(mutex_);
  process_ = process;
  std::vector<Device*> added;
  for (const int ordinal : ordinals) {
    if (devices_.contains(ordinal)) continue;
    auto device = std::make_unique<Device>(ordinal);
    device->set_timeout_s(timeout_s_);
    added.push_back(device.get());
    devices_.emplace(ordinal, std::move(device));
  }
  for (Device* device : added) {
    for (const auto& [ordinal, other] : devices_) {
      if (other.get() == device) continue;
      for (const auto& [from, to] : {std::pair(device, other.get()), std::pair(other.get(), device)}) {
        if (const std::string problem = ProbePeer(*from, *to); !problem.empty()) throw CudaError(problem);
      }
    }
  }
  if (!watching_ && !devices_.empty()) {
    watching_ = true;
    std::thread(&Engine::Watch, this).detach();
  }
}

Device& Engine::device(int64_t ordinal) {
  std::lock_guard lock(mutex_);
  const auto entry = devices_.find(ordinal);
  if (entry == devices_.end()) throw CudaError("GPU " + std::to_string(ordinal) + " has not been set up for exchanges");
  return *entry->second;
}

std::vector<Device*> Engine::devices() {
  std::lock_guard lock(mutex_);
  std::vector<Device*> devices;
  for (const auto& [ordinal, device] : devices_) devices.push_back(device.get());
  return devices;
}

std::shared_ptr<Channel> Engine::Make(const ChannelRequest& request, bool pull) {
  std::vector<Device*> devices;
  for (const Location& location : request.locations) {
    devices.push_back(location.process == process_ ? &device(location.ordinal) : nullptr);
  }
  auto channel = std::make_shared<Channel>(request.program, request.exchange_id,
                                           TitleOf(request.exchange_id, request.name), pull, std::move(devices));
  std::lock_guard lock(mutex_);
  std::erase_if(channels_, [](const auto& entry) { return entry.second.expired(); });
  channels_.emplace(channel->number(), channel);
  return channel;
}

std::shared_ptr<Channel> Engine::Open(const ChannelRequest& request) {
  std::shared_ptr<Channel> channel = Make(request, /*pull=*/false);
  channel->Finish();
  return channel;
}

std::shared_ptr<Channel> Engine::OpenShared(const ChannelRequest& request) {
  static std::mutex opening;  // ranks that open the same one at the same time get one
  std::lock_guard open_lock(opening);
  {
    std::lock_guard lock(mutex_);
    std::erase_if(shared_, [](const auto& entry) { return entry.second.expired(); });
    const auto [first, last] = shared_.equal_range(request.exchange_id);
    for (auto entry = first; entry != last; ++entry) {
      auto channel = entry->second.lock();
      if (channel && channel->program().encoding == request.program->encoding) return channel;
    }
  }
  std::shared_ptr<Channel> channel = Open(request);
  std::lock_guard lock(mutex_);
  shared_.emplace(request.exchange_id, channel);
  return channel;
}

std::shared_ptr<Channel> Engine::OpenDistributed(const ChannelRequest& request) {
  std::shared_ptr<Channel> channel = Make(request, /*pull=*/true);
  std::lock_guard lock(mutex_);
  distributed_.emplace(request.exchange_id, channel);
  return channel;
}

std::shared_ptr<Channel> Engine::FindDistributed(const ChannelRequest& request) {
  std::lock_guard lock(mutex_);
  const auto [first, last] = distributed_.equal_range(request.exchange_id);
  for (auto entry = first; entry != last; ++entry) {
    const auto& channel = entry->second;
    if (channel->IsReady() && channel->program().encoding == request.program->encoding) return channel;
  }
  throw CudaError(TitleOf(request.exchange_id, request.name) +
                  " spans processes, which have not agreed on it: trace the function in every process");
}

void Engine::set_timeout_s(double timeout_s) {
  std::lock_guard lock(mutex_);
  timeout_s_ = timeout_s;
  for (const auto& [ordinal, device] : devices_) device->set_timeout_s(timeout_s);
}

// With `mutex_` held.
std::string Engine::Describe(const Device& device) {
  const Status& status = *device.status();
  const auto entry = channels_.find(status.channel);
  const auto channel = entry == channels_.end() ? nullptr : entry->second.lock();
  std::ostringstream message;
  message << (channel ? channel->title() : "an exchange that no longer exists") << " on device rank " << status.rank
          << " (GPU " << device.ordinal() << "): ";
  const auto num_steps = channel ? static_cast<uint64_t>(channel->schedule().view().header().num_steps) : 1;
  // Steps count from 1, calls from 0.
  const uint64_t step = (status.stamp - 1) % num_steps + 1, call = (status.stamp - 1) / num_steps;
  switch (ReasonOf(status)) {
    case Reason::kMissingRank:
      message << "within " << timeout_s_ << " s device rank " << status.peer
              << (step == 1 ? " did not come to call " : " did not do its part of call ") << call
              << ". Every device must run the exchange, in the same order as other exchanges; if it is only slow, raise "
                 "EINSUMMABLE_JAX_EXCHANGE_TIMEOUT_S";
      break;
    case Reason::kPeerFailed:
      message << "device rank " << status.peer << " has failed";
      break;
    case Reason::kStuckTeam:
      message << "within " << timeout_s_ << " s some blocks of its own kernel did not do their part";
      break;
    default:
      message << "the executable runs device rank " << status.peer
              << " there: the devices of the mesh are not those that the function was traced for";
  }
  return message.str();
}

void Engine::Stop(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (!stopped_) stopped_ = message;
  for (const auto& [ordinal, device] : devices_) device->Stop();
}

// Why the host has stopped all says most; a rank that waited in vain says more than one that heard of it.
std::optional<std::string> Engine::Failure() {
  std::lock_guard lock(mutex_);
  if (stopped_) return stopped_;
  const Device* failed = nullptr;
  for (const auto& [ordinal, device] : devices_) {
    const Reason reason = ReasonOf(*device->status());
    if (reason == Reason::kNone) continue;
    if (failed == nullptr || ReasonOf(*failed->status()) == Reason::kPeerFailed) failed = device.get();
  }
  if (failed == nullptr) return std::nullopt;
  return Describe(*failed);
}

void Engine::ResetFailure() {
  std::vector<std::shared_ptr<Channel>> channels;
  {
    std::lock_guard lock(mutex_);
    stopped_.reset();
    for (const auto& [number, channel] : channels_) {
      if (auto open = channel.lock()) channels.push_back(std::move(open));
    }
  }
  for (const auto& channel : channels) channel->Reset();
  for (Device* device : devices()) device->ResetStatus();
}

// Says on the standard error what has failed, when it fails: the results of the run that failed are NaN, but no error.
void Engine::Watch() {
  bool told = false;
  while (true) {
    std::this_thread::sleep_for(kWatchInterval);
    const auto failure = Failure();
    if (failure && !told) std::fprintf(stderr, "einsummable_jax: %s\n", failure->c_str());
    told = failure.has_value();
  }
}

}  // namespace einsummable::cuda
