#include "cuda/channel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "cuda/check.h"

namespace einsummable::cuda {
namespace {

// What one part of a move reads and writes: enough for the threads of a block to have several loads under way, and few
// enough to leave all blocks something to do.
constexpr int64_t kMinPartBytes = 32 << 10;
constexpr int64_t kMaxPartBytes = 256 << 10;
constexpr int64_t kPartsPerMultiprocessor = 4;

int64_t NextNumber() {
  static std::atomic<int64_t> numbers{0};
  return ++numbers;
}

int64_t NumSlots(const Program& program, int32_t rank) {
  const auto& sizes = program.sizes[rank];
  return static_cast<int64_t>(sizes[static_cast<int>(Space::kInput)].size() +
                              sizes[static_cast<int>(Space::kOutput)].size());
}

std::unique_ptr<const Schedule> MakeSchedule(const Program& program, bool pull, const std::vector<Device*>& devices) {
  const ScheduleOptions options = {pull ? Copies::kPull : Copies::kPush, kMaxPartBytes};
  auto coarse = std::make_unique<const Schedule>(program, options);
  int64_t processors = 1;
  for (const Device* device : devices) {
    if (device != nullptr) processors = std::max<int64_t>(processors, device->multiprocessors());
  }
  const auto& header = coarse->view().header();
  const double per_rank = header.traffic_bytes / std::max(1, header.num_participants);
  const double wanted = per_rank / static_cast<double>(processors * kPartsPerMultiprocessor);
  if (wanted >= static_cast<double>(kMaxPartBytes)) return coarse;
  const int64_t part_bytes = std::max(kMinPartBytes, static_cast<int64_t>(wanted));
  return std::make_unique<const Schedule>(program, ScheduleOptions{options.copies, part_bytes});
}

}  // namespace

ControlLayout::ControlLayout(const Program& program) {
  constexpr int64_t kLine = kFlagStride * static_cast<int64_t>(sizeof(uint64_t));
  int64_t slots = 0;
  for (int32_t rank = 0; rank < program.num_devices; ++rank) {
    num_slots_.push_back(NumSlots(program, rank));
    slots_before_.push_back(slots);
    slots += num_slots_.back();
  }
  count = program.num_devices * kLine;
  failed = count + kLine;
  mailboxes_ = failed + kLine;
  bytes = mailboxes_ + 2 * slots * static_cast<int64_t>(sizeof(uint64_t));
}

int64_t ControlLayout::FlagOf(int32_t peer) const {
  return peer * kFlagStride * static_cast<int64_t>(sizeof(uint64_t));
}

int64_t ControlLayout::MailboxOf(int32_t peer) const {
  return mailboxes_ + 2 * slots_before_[peer] * static_cast<int64_t>(sizeof(uint64_t));
}

Channel::Channel(std::shared_ptr<const Program> program, int64_t exchange_id, std::string title, bool pull,
                 std::vector<Device*> devices)
    : program_(std::move(program)), exchange_id_(exchange_id), number_(NextNumber()), title_(std::move(title)),
      devices_(std::move(devices)), schedule_(MakeSchedule(*program_, pull, devices_)), layout_(*program_),
      ranks_(program_->num_devices), endpoints_(program_->num_devices) {
  try {
    for (int32_t rank = 0; rank < program_->num_devices; ++rank) {
      if (devices_[rank] == nullptr) continue;
      Allocate(rank);
      ZeroControl(rank);
      endpoints_[rank] = {ranks_[rank].control.address, ranks_[rank].scratch.address};
    }
  } catch (...) {
    GiveBack();
    throw;
  }
}

Channel::~Channel() { GiveBack(); }

void Channel::GiveBack() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (devices_[rank] == nullptr) continue;
    for (const Arena::Block& block : {ranks_[rank].control, ranks_[rank].scratch, ranks_[rank].tables}) {
      devices_[rank]->arena().Give(block);
    }
  }
}

void Channel::Allocate(int32_t rank) {
  Device& device = *devices_[rank];
  const DeviceScope scope(device.ordinal());
  LocalRank& local = ranks_[rank];
  const int64_t scratch_bytes = kSlots * schedule_->view().rank(rank).scratch_bytes;
  const int64_t tables_bytes = static_cast<int64_t>(schedule_->size()) +
                               program_->num_devices * static_cast<int64_t>(sizeof(PeerView)) +
                               layout_.num_slots(rank) * static_cast<int64_t>(sizeof(int64_t));
  try {
    local.control = device.arena().Take(static_cast<size_t>(layout_.bytes));
    local.tables = device.arena().Take(static_cast<size_t>(tables_bytes));
    local.scratch = device.arena().Take(static_cast<size_t>(scratch_bytes));
  } catch (const CudaError& error) {
    throw CudaError(title_ + ": no memory for " + std::to_string(scratch_bytes) + " bytes of scratch memory on GPU " +
                    std::to_string(device.ordinal()) + " (" + error.what() +
                    "). JAX takes most of the memory for itself: lower XLA_PYTHON_CLIENT_MEM_FRACTION");
  }
}

void Channel::ZeroControl(int32_t rank) {
  const std::vector<char> zeros(static_cast<size_t>(layout_.bytes));
  devices_[rank]->CopyIn(ranks_[rank].control.address, zeros.data(), zeros.size());
}

// As many as have something to do in the longest phase; on a device that several ranks share, all must be resident together.
int32_t Channel::WorkersOf(int32_t rank) const {
  const ScheduleView view = schedule_->view();
  const Range phases = view.rank(rank).phases;
  int32_t most_parts = 1;
  for (int32_t i = phases.begin; i < phases.end; ++i) most_parts = std::max(most_parts, view.phase(i).parts.size());
  const int32_t resident = devices_[rank]->resident_blocks() / SharersOf(rank);
  if (resident == 0) {
    throw std::invalid_argument(title_ + ": " + std::to_string(SharersOf(rank)) + " ranks are too many for one GPU, which runs " +
                                std::to_string(devices_[rank]->resident_blocks()) + " blocks at a time");
  }
  return std::min(most_parts, resident);
}

int32_t Channel::SharersOf(int32_t rank) const {
  return static_cast<int32_t>(std::count(devices_.begin(), devices_.end(), devices_[rank]));
}

void Channel::Connect(int32_t rank, const Endpoint& endpoint) { endpoints_[rank] = endpoint; }

void Channel::Finish() {
  const int32_t num_ranks = program_->num_devices;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    if (!endpoints_[rank].IsKnown()) {
      throw std::logic_error(title_ + ": the memory of device rank " + std::to_string(rank) + " is not known");
    }
  }
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    if (devices_[rank] == nullptr) continue;
    const Device& device = *devices_[rank];
    LocalRank& local = ranks_[rank];
    char* const control = local.control.address;
    auto words = [](char* address) { return reinterpret_cast<uint64_t*>(address); };
    std::vector<PeerView> peers;
    for (int32_t peer = 0; peer < num_ranks; ++peer) {
      char* const theirs = endpoints_[peer].control;
      peers.push_back({words(theirs + layout_.FlagOf(rank)), words(theirs + layout_.MailboxOf(rank)),
                       words(control + layout_.MailboxOf(peer)), endpoints_[peer].scratch, layout_.num_slots(peer)});
    }
    std::vector<int64_t> slot_bytes;
    for (const Space space : {Space::kInput, Space::kOutput}) {
      for (int64_t size : program_->sizes[rank][static_cast<int>(space)]) slot_bytes.push_back(size * program_->item_size);
    }
    // One copy for all tables: the schedule, whose size is a multiple of 16, the peers, the sizes.
    std::vector<char> tables(schedule_->data(), schedule_->data() + schedule_->size());
    auto append = [&](const auto& array) {
      const auto offset = static_cast<int64_t>(tables.size());
      const auto* bytes = reinterpret_cast<const char*>(array.data());
      tables.insert(tables.end(), bytes, bytes + array.size() * sizeof(array[0]));
      return local.tables.address + offset;
    };
    RankView& view = local.launch.view;
    view.channel = number_;
    view.rank = rank;
    view.num_workers = WorkersOf(rank);
    view.num_inputs = static_cast<int32_t>(program_->sizes[rank][static_cast<int>(Space::kInput)].size());
    view.num_slots = static_cast<int32_t>(layout_.num_slots(rank));
    view.flags = words(control);
    view.count = words(control + layout_.count);
    view.failed = reinterpret_cast<uint32_t*>(control + layout_.failed);
    view.peers = reinterpret_cast<const PeerView*>(append(peers));
    view.slot_bytes = reinterpret_cast<const int64_t*>(append(slot_bytes));
    view.float8 = device.float8();
    view.shared = device.shared();
    view.status = device.status();
    view.settings = device.settings();
    local.launch.schedule = local.tables.address;
    devices_[rank]->CopyIn(local.tables.address, tables.data(), tables.size());
  }
  ready_ = true;
}

RankLaunch Channel::LaunchOf(int32_t rank, const Operands& operands) const {
  RankLaunch launch = ranks_[rank].launch;
  launch.rank_operand = operands.rank;
  launch.token_in = operands.token_in;
  launch.token_out = operands.token_out;
  return launch;
}

void Channel::Reset() {
  for (int32_t rank = 0; rank < program_->num_devices; ++rank) {
    if (devices_[rank] != nullptr) ZeroControl(rank);
  }
}

}  // namespace einsummable::cuda
