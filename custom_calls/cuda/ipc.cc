#include "cuda/ipc.h"

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/check.h"

namespace einsummable::cuda {
namespace {

// FNV-1a over the program's numbers and the exchange id.
uint64_t Fingerprint(const Channel& channel) {
  uint64_t hash = 0xcbf29ce484222325;
  auto add = [&](int64_t number) { hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3; };
  for (const int64_t number : channel.program().encoding) add(number);
  add(channel.exchange_id());
  return hash;
}

}  // namespace

SharedPlace Share(Device& device, const char* address) {
  const DeviceScope scope(device.ordinal());
  char* const chunk = device.arena().ChunkOf(address);
  SharedPlace place = {};
  EINSUMMABLE_CHECK_CUDA(cudaIpcGetMemHandle(&place.chunk, chunk));
  place.offset = static_cast<uint64_t>(address - chunk);
  return place;
}

char* Map(const SharedPlace& place) {
  using Key = std::array<char, sizeof(cudaIpcMemHandle_t)>;
  static std::mutex mutex;
  static auto* const mapped = new std::map<Key, char*>;  // for as long as the process lives
  Key key;
  std::memcpy(key.data(), &place.chunk, key.size());
  std::lock_guard lock(mutex);
  auto entry = mapped->find(key);
  if (entry == mapped->end()) {
    void* chunk = nullptr;
    EINSUMMABLE_CHECK_CUDA(cudaIpcOpenMemHandle(&chunk, place.chunk, cudaIpcMemLazyEnablePeerAccess));
    entry = mapped->emplace(key, static_cast<char*>(chunk)).first;
  }
  return entry->second + place.offset;
}

Ticket MakeTicket(const Channel& channel, int32_t rank) {
  Device& device = *channel.device(rank);
  const Endpoint& endpoint = channel.endpoint(rank);
  return {Share(device, endpoint.control), Share(device, endpoint.scratch), Fingerprint(channel)};
}

void Connect(Channel& channel, int32_t rank, const Ticket& ticket) {
  if (rank < 0 || rank >= channel.program().num_devices) {
    throw std::invalid_argument(channel.title() + ": there is no device rank " + std::to_string(rank));
  }
  if (ticket.fingerprint != Fingerprint(channel)) {
    throw std::invalid_argument(channel.title() + ": the process of device rank " + std::to_string(rank) +
                                " has another exchange there: all processes must trace the same functions in the same order");
  }
  Device* local = nullptr;
  for (int32_t other = 0; other < channel.program().num_devices; ++other) {
    Device* const device = channel.device(other);
    if (device == nullptr) continue;
    if (local != nullptr && device != local) {
      throw std::invalid_argument(channel.title() +
                                  ": exchanges between processes need one GPU per process; give each process its own "
                                  "(local_device_ids of jax.distributed.initialize)");
    }
    local = device;
  }
  const DeviceScope scope(local->ordinal());
  channel.Connect(rank, {Map(ticket.control), Map(ticket.scratch)});
}

}  // namespace einsummable::cuda
