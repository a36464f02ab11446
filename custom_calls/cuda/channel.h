// What the ranks of one exchange share: flags, mailboxes, scratch memory, and where those of the other ranks are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/program.h"
#include "core/schedule.h"
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace einsummable::cuda {

// Where the memory of one rank is, as a device of this process reaches it.
struct Endpoint {
  char* control = nullptr;  // flags, count and mailboxes, as `ControlLayout` has them
  char* scratch = nullptr;

  bool IsKnown() const { return control != nullptr; }
};

// What one rank hands to the kernel besides its buffers; all in memory of the device, or null.
struct Operands {
  const int32_t* rank = nullptr;
  const int32_t* token_in = nullptr;
  int32_t* token_out = nullptr;
};

// Where things are in a rank's control memory. Offsets in bytes, the same for all ranks of an exchange.
struct ControlLayout {
  explicit ControlLayout(const Program& program);

  int64_t FlagOf(int32_t peer) const;
  int64_t MailboxOf(int32_t peer) const;  // of two halves
  int64_t num_slots(int32_t rank) const { return num_slots_[rank]; }

  int64_t count, failed, bytes;

 private:
  int64_t mailboxes_;
  std::vector<int64_t> num_slots_, slots_before_;
};

// The opening of a channel has three steps: each rank makes its memory, with all flags zero; then, and not before, the others
// are told where it is; when a rank knows where all others are, it is ready.
class Channel {
 public:
  // `devices`: of each rank, null for a rank of another process. `pull`: no rank writes into another's buffers.
  Channel(std::shared_ptr<const Program> program, int64_t exchange_id, std::string title, bool pull,
          std::vector<Device*> devices);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const Program& program() const { return *program_; }
  const Schedule& schedule() const { return *schedule_; }
  const std::string& title() const { return title_; }
  int64_t exchange_id() const { return exchange_id_; }
  // A number that no other channel of the process has.
  int64_t number() const { return number_; }
  Device* device(int32_t rank) const { return devices_[rank]; }  // null for a rank of another process
  int32_t num_workers(int32_t rank) const { return ranks_[rank].launch.view.num_workers; }
  bool Participates(int32_t rank) const { return schedule_->view().Participates(rank); }
  // How many ranks its device runs.
  int32_t SharersOf(int32_t rank) const;

  const Endpoint& endpoint(int32_t rank) const { return endpoints_[rank]; }
  void Connect(int32_t rank, const Endpoint& endpoint);
  // Once every rank's memory is known.
  void Finish();
  bool IsReady() const { return ready_; }

  // What the kernel is to be given for a rank of this process that takes part.
  RankLaunch LaunchOf(int32_t rank, const Operands& operands) const;

  // Forgets a failure: zeroes all flags of the ranks of this process, none of which may be running.
  void Reset();

 private:
  struct LocalRank {
    Arena::Block control, scratch, tables;
    RankLaunch launch = {};
  };

  void Allocate(int32_t rank);
  void GiveBack();
  void ZeroControl(int32_t rank);
  int32_t WorkersOf(int32_t rank) const;

  const std::shared_ptr<const Program> program_;
  const int64_t exchange_id_, number_;
  const std::string title_;
  const std::vector<Device*> devices_;
  const std::unique_ptr<const Schedule> schedule_;
  const ControlLayout layout_;
  std::vector<LocalRank> ranks_;
  std::vector<Endpoint> endpoints_;
  bool ready_ = false;
};

}  // namespace einsummable::cuda
