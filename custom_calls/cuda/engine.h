// The CUDA engine of the process: its devices, the channels that are open, and what has failed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/program.h"
#include "cuda/channel.h"
#include "cuda/device.h"
#include "cuda/peers.h"

namespace einsummable::cuda {

// Where a rank runs: a process of the job, and a device as CUDA numbers them in that process.
struct Location {
  int64_t process, ordinal;

  bool operator==(const Location&) const = default;
};

// What opens a channel.
struct ChannelRequest {
  std::shared_ptr<const Program> program;
  int64_t exchange_id = 0;
  std::string name;  // the operation that the exchange serves
  std::vector<Location> locations;  // by rank
};

class Engine {
 public:
  // The one engine; never destroyed.
  static Engine& Get();

  // Makes the devices known that this process runs exchanges on, and tries the way between any two of them. Before anything
  // runs there: it allocates, and waits. Throws CudaError.
  void SetUp(int64_t process, const std::vector<int>& ordinals);
  int64_t process() const { return process_; }
  Device& device(int64_t ordinal);
  std::vector<Device*> devices();

  // A channel whose ranks are all in this process, ready for use; it is closed when nobody holds it.
  std::shared_ptr<Channel> Open(const ChannelRequest& request);
  // The same for calls that are instructions of their own on each rank: they find each other by the exchange id and program.
  std::shared_ptr<Channel> OpenShared(const ChannelRequest& request);
  // A channel with ranks of other processes, kept until it is closed; not ready before it has been connected.
  std::shared_ptr<Channel> OpenDistributed(const ChannelRequest& request);
  // The channel that `OpenDistributed` made for an exchange of this id and program.
  std::shared_ptr<Channel> FindDistributed(const ChannelRequest& request);

  Reach& reach() { return reach_; }

  double timeout_s() const { return timeout_s_; }
  void set_timeout_s(double timeout_s);

  // Ends the exchanges that wait for a device, and later ones, with `message`: a callback has failed that they need.
  void Stop(const std::string& message);

  // What has failed first on some device, until it is reset.
  std::optional<std::string> Failure();
  void ResetFailure();

 private:
  Engine();
  std::shared_ptr<Channel> Make(const ChannelRequest& request, bool pull);
  std::string Describe(const Device& device);
  void Watch();

  std::mutex mutex_;
  int64_t process_ = 0;
  std::map<int64_t, std::unique_ptr<Device>> devices_;
  std::map<int64_t, std::weak_ptr<Channel>> channels_;  // by number
  std::multimap<int64_t, std::weak_ptr<Channel>> shared_;  // by exchange id
  std::multimap<int64_t, std::shared_ptr<Channel>> distributed_;  // by exchange id
  Reach reach_;
  double timeout_s_;
  std::optional<std::string> stopped_;  // why, if it is
  bool watching_ = false;
};

// What messages call an exchange.
std::string TitleOf(int64_t exchange_id, const std::string& name);

}  // namespace einsummable::cuda
