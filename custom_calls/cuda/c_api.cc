// What Python calls through ctypes: setting up, failures, and channels that are opened and run without XLA.
//
// Functions that can fail return a negative number and write why into `message`.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "cuda/check.h"
#include "cuda/engine.h"
#include "cuda/ipc.h"
#include "cuda/kernels.h"
#include "cuda/message.h"

namespace einsummable::cuda {
namespace {

// A channel that Python has opened, with what a launch of all its ranks on one device needs.
struct OpenChannel {
  std::shared_ptr<Channel> channel;
  Arena::Block launches;
};

std::mutex mutex;
std::map<int64_t, OpenChannel> open_channels;  // by number

OpenChannel& Find(int64_t number) {
  std::lock_guard lock(mutex);
  const auto entry = open_channels.find(number);
  if (entry == open_channels.end()) throw std::invalid_argument("there is no open channel " + std::to_string(number));
  return entry->second;
}

ChannelRequest RequestOf(const int64_t* encoding, int64_t length, int64_t exchange_id, const char* name,
                         const int64_t* locations) {
  auto decoded = Decode(encoding, static_cast<size_t>(length));
  if (const auto* problem = std::get_if<std::string>(&decoded)) {
    throw std::invalid_argument(TitleOf(exchange_id, name) + ": " + *problem);
  }
  ChannelRequest request = {std::move(std::get<0>(decoded)), exchange_id, name, {}};
  for (int32_t rank = 0; rank < request.program->num_devices; ++rank) {
    request.locations.push_back({locations[2 * rank], locations[2 * rank + 1]});
  }
  return request;
}

void CheckRank(const Channel& channel, int64_t rank) {
  if (rank >= 0 && rank < channel.program().num_devices && channel.device(static_cast<int32_t>(rank)) != nullptr) return;
  throw std::invalid_argument(channel.title() + ": this process does not run device rank " + std::to_string(rank));
}

}  // namespace
}  // namespace einsummable::cuda

using einsummable::cuda::CheckRank;
using einsummable::cuda::Find;
using einsummable::cuda::Guarded;

// Number of GPUs, 0 where there is no driver.
EINSUMMABLE_EXPORT int EinsummableCudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

EINSUMMABLE_EXPORT int EinsummableCudaSetUp(int64_t process, const int64_t* ordinals, int64_t count, char* message,
                                            int64_t capacity) {
  return Guarded(message, capacity, [&] {
    einsummable::cuda::Engine::Get().SetUp(process, std::vector<int>(ordinals, ordinals + count));
    return 0;
  });
}

// Ends the exchanges that wait for a device, and later ones, with `reason`.
EINSUMMABLE_EXPORT int EinsummableCudaStop(const char* reason, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    einsummable::cuda::Engine::Get().Stop(reason);
    return 0;
  });
}

// 1 with what has failed, 0 if nothing has.
EINSUMMABLE_EXPORT int EinsummableCudaFailure(char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const auto failure = einsummable::cuda::Engine::Get().Failure();
    if (failure) einsummable::cuda::WriteMessage(*failure, message, capacity);
    return failure ? 1 : 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaResetFailure(char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    einsummable::cuda::Engine::Get().ResetFailure();
    return 0;
  });
}

EINSUMMABLE_EXPORT void EinsummableCudaSetTimeout(double timeout_s) {
  einsummable::cuda::Engine::Get().set_timeout_s(timeout_s);
}

// Opens a channel and returns its number. `locations`: for each rank its process and its device. With ranks of other
// processes it has to be connected before it is used.
EINSUMMABLE_EXPORT int64_t EinsummableCudaOpen(const int64_t* encoding, int64_t length, int64_t exchange_id,
                                               const char* name, const int64_t* locations, char* message,
                                               int64_t capacity) {
  return Guarded(message, capacity, [&] {
    using einsummable::cuda::Engine;
    const auto request = einsummable::cuda::RequestOf(encoding, length, exchange_id, name, locations);
    const bool local = std::all_of(request.locations.begin(), request.locations.end(), [](const auto& location) {
      return location.process == Engine::Get().process();
    });
    auto channel = local ? Engine::Get().Open(request) : Engine::Get().OpenDistributed(request);
    std::lock_guard lock(einsummable::cuda::mutex);
    const int64_t number = channel->number();
    einsummable::cuda::open_channels[number] = {std::move(channel), {}};
    return number;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaClose(int64_t number, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    auto& open = Find(number);
    if (open.launches.address != nullptr) open.channel->device(0)->arena().Give(open.launches);
    std::lock_guard lock(einsummable::cuda::mutex);
    einsummable::cuda::open_channels.erase(number);
    return 0;
  });
}

// Blocks that run `rank`.
EINSUMMABLE_EXPORT int EinsummableCudaWorkers(int64_t number, int64_t rank, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const auto& channel = *Find(number).channel;
    CheckRank(channel, rank);
    return channel.num_workers(static_cast<int32_t>(rank));
  });
}

// Enqueues the part of one rank. `buffers`: its inputs, then its outputs.
EINSUMMABLE_EXPORT int EinsummableCudaLaunch(int64_t number, int64_t rank, void* const* buffers, int64_t count,
                                             void* stream, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const auto& channel = *Find(number).channel;
    CheckRank(channel, rank);
    const auto r = static_cast<int32_t>(rank);
    if (!channel.Participates(r)) return 0;
    const einsummable::cuda::DeviceScope scope(channel.device(r)->ordinal());
    LaunchRank(channel.LaunchOf(r, {}), std::vector<void*>(buffers, buffers + count), channel.SharersOf(r) == 1,
               static_cast<cudaStream_t>(stream));
    return 0;
  });
}

// Makes ready for launches of all ranks as one kernel, all on one device and taking part. `buffers`: those of rank 0, then of rank
// 1, and so on.
EINSUMMABLE_EXPORT int EinsummableCudaPrepareTogether(int64_t number, void* const* buffers, char* message,
                                                      int64_t capacity) {
  return Guarded(message, capacity, [&] {
    auto& open = Find(number);
    const auto& channel = *open.channel;
    auto& device = *channel.device(0);
    std::vector<einsummable::cuda::RankLaunch> launches;
    std::vector<void*> pointers;  // where the buffers of each rank begin, then the buffers
    const int32_t num_ranks = channel.program().num_devices;
    size_t slots = 0;
    int32_t workers = channel.num_workers(0);
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      if (channel.device(rank) != &device || !channel.Participates(rank)) {
        throw std::invalid_argument(channel.title() + ": not all ranks take part on one device");
      }
      launches.push_back(channel.LaunchOf(rank, {}));
      workers = std::min(workers, channel.num_workers(rank));
      slots += static_cast<size_t>(launches.back().view.num_slots);
    }
    const size_t launch_bytes = launches.size() * sizeof(launches[0]);
    const einsummable::cuda::DeviceScope scope(device.ordinal());
    if (open.launches.address == nullptr) {
      open.launches = device.arena().Take(launch_bytes + (launches.size() + slots) * sizeof(void*));
    }
    auto* const first = reinterpret_cast<void**>(open.launches.address + launch_bytes);
    size_t before = 0;
    for (auto& launch : launches) {
      launch.view.num_workers = workers;
      pointers.push_back(first + launches.size() + before);
      before += static_cast<size_t>(launch.view.num_slots);
    }
    pointers.insert(pointers.end(), buffers, buffers + slots);
    device.CopyIn(open.launches.address, launches.data(), launch_bytes);
    device.CopyIn(first, pointers.data(), pointers.size() * sizeof(void*));
    return workers;
  });
}

// `workers` is what `EinsummableCudaPrepareTogether` returned.
EINSUMMABLE_EXPORT int EinsummableCudaLaunchTogether(int64_t number, int workers, void* stream, char* message,
                                                     int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const auto& open = Find(number);
    const int32_t num_ranks = open.channel->program().num_devices;
    const auto* launches = reinterpret_cast<const einsummable::cuda::RankLaunch*>(open.launches.address);
    const auto* buffers = reinterpret_cast<void* const* const*>(launches + num_ranks);
    const einsummable::cuda::DeviceScope scope(open.channel->device(0)->ordinal());
    LaunchRanks(launches, buffers, num_ranks, workers, static_cast<cudaStream_t>(stream));
    return 0;
  });
}

// What another process is to be told of one rank: `EinsummableCudaTicketBytes` bytes.
EINSUMMABLE_EXPORT int64_t EinsummableCudaTicketBytes() { return sizeof(einsummable::cuda::Ticket); }

EINSUMMABLE_EXPORT int EinsummableCudaTicket(int64_t number, int64_t rank, char* ticket, char* message,
                                             int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const auto& channel = *Find(number).channel;
    CheckRank(channel, rank);
    const auto made = einsummable::cuda::MakeTicket(channel, static_cast<int32_t>(rank));
    std::memcpy(ticket, &made, sizeof(made));
    return 0;
  });
}

// What this process has to know of a rank of another one.
EINSUMMABLE_EXPORT int EinsummableCudaConnect(int64_t number, int64_t rank, const char* ticket, char* message,
                                              int64_t capacity) {
  return Guarded(message, capacity, [&] {
    einsummable::cuda::Ticket given;
    std::memcpy(&given, ticket, sizeof(given));
    einsummable::cuda::Connect(*Find(number).channel, static_cast<int32_t>(rank), given);
    return 0;
  });
}

// Once every rank of other processes has been connected.
EINSUMMABLE_EXPORT int EinsummableCudaFinish(int64_t number, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    Find(number).channel->Finish();
    return 0;
  });
}

// ---- Trying the memory of other processes -----------------------------------------------------------------------

namespace {

// That of this process, in which all others write.
std::unique_ptr<einsummable::cuda::ProbeBoard> board;

}  // namespace

EINSUMMABLE_EXPORT int64_t EinsummableCudaPlaceBytes() { return sizeof(einsummable::cuda::SharedPlace); }

// Makes the board of process `participant`, and gives its place, of `EinsummableCudaPlaceBytes` bytes.
EINSUMMABLE_EXPORT int EinsummableCudaOpenBoard(int64_t ordinal, int64_t participant, int64_t num_participants, char* place,
                                                char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    auto& device = einsummable::cuda::Engine::Get().device(ordinal);
    board = std::make_unique<einsummable::cuda::ProbeBoard>(device, static_cast<int>(participant),
                                                            static_cast<int>(num_participants));
    const auto shared = einsummable::cuda::Share(device, board->address());
    std::memcpy(place, &shared, sizeof(shared));
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaTryBoard(int64_t other, const char* place, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    einsummable::cuda::SharedPlace given;
    std::memcpy(&given, place, sizeof(given));
    const einsummable::cuda::DeviceScope scope(board->device().ordinal());
    const std::string problem = board->Try(static_cast<int>(other), einsummable::cuda::Map(given));
    if (!problem.empty()) throw einsummable::cuda::CudaError(problem);
    return 0;
  });
}

EINSUMMABLE_EXPORT int EinsummableCudaVerifyBoard(int64_t other, char* message, int64_t capacity) {
  return Guarded(message, capacity, [&] {
    const std::string problem = board->Verify(static_cast<int>(other));
    if (!problem.empty()) throw einsummable::cuda::CudaError(problem);
    return 0;
  });
}
