// What a kernel knows of the rank it runs: plain structures in device memory, made by `channel.cc`.
#pragma once

#include <cstdint>

#include "core/element.h"

namespace einsummable::cuda {

// One 8-bit float format per entry, in the order of `Float8Index`.
inline constexpr int kNumFloat8 = 8;

// Why a rank has failed.
enum class Reason : uint64_t {
  kNone = 0,
  kMissingRank = 1,  // a peer has not got as far as it had to within the timeout
  kPeerFailed = 2,   // a peer has failed and said so
  kStuckTeam = 3,    // other blocks of the rank have not got as far as they had to within the timeout
  kWrongRank = 4,    // the executable runs on another rank than this device was set up for
  kStopped = 5,      // the host has said that a peer will not come
};

// The first failure on a device, in memory of the host that the device writes. `reason` is written last.
struct Status {
  uint64_t reason;  // a `Reason`
  int64_t channel;  // number of the channel
  int64_t rank;
  int64_t peer;     // rank that was waited for; with `kWrongRank`, the rank that the executable gave
  uint64_t stamp;   // what was waited for
};

// In memory of the host that the device reads, seldom: what it says holds for captured kernels too.
struct Settings {
  uint64_t timeout_ns;
  uint64_t stopped;  // not 0: no rank that is waited for will come any more
};

// Memory of the device that all its channels share.
struct DeviceShared {
  uint32_t failed;  // a channel has failed and has written the status
};

// What a rank knows of another one. Addresses are those by which this rank's device reaches the memory.
struct PeerView {
  uint64_t* flag;         // in the peer's memory: what this rank has published to it
  uint64_t* mailbox;      // in the peer's memory, of two halves: the addresses of this rank's inputs and outputs
  uint64_t* own_mailbox;  // in this rank's memory, of two halves: the addresses of the peer's inputs and outputs
  char* scratch;          // the peer's scratch memory
  int64_t num_slots;      // the peer's inputs and outputs
};

// A flag has a line of its own: it is polled by many while another device writes it.
inline constexpr int kFlagStride = 16;  // in 8-byte words

struct RankView {
  int64_t channel;
  int32_t rank;
  int32_t num_workers;
  int32_t num_inputs;
  int32_t num_slots;          // inputs, then outputs
  uint64_t* flags;            // what the others have published to this rank, `kFlagStride` words apart
  uint64_t* count;            // the team's count
  uint32_t* failed;           // whether this rank has failed, sticky
  const PeerView* peers;      // by rank
  const int64_t* slot_bytes;  // by slot
  const Float8* float8;       // `kNumFloat8` tables
  DeviceShared* shared;
  Status* status;
  const Settings* settings;
};

// The table of an 8-bit float type in `RankView::float8`.
constexpr int Float8Index(int32_t dtype) {
  switch (dtype) {
    case 19: return 0;  // e5m2
    case 20: return 1;  // e4m3fn
    case 23: return 2;  // e4m3b11fnuz
    case 24: return 3;  // e5m2fnuz
    case 25: return 4;  // e4m3fnuz
    case 28: return 5;  // e4m3
    case 29: return 6;  // e3m4
    default: return 7;  // e8m0fnu
  }
}

}  // namespace einsummable::cuda
