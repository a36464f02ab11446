// What the ranks of an exchange publish to each other: numbers that only grow, and are used again from call to call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace einsummable::cpu {

// On cache lines of its own: each rank's is written by the thread that has taken the rank up.
struct alignas(64) RankFlags {
  std::atomic<uint64_t> progress{0};  // the stamp that the rank has published
  std::atomic<uint64_t> count{0};     // the workers of the rank that are done with a phase, in all calls
};

// Flags of calls that have ended, for calls to come.
class SpareFlags {
 public:
  using Flags = std::unique_ptr<RankFlags[]>;  // by rank

  explicit SpareFlags(int32_t num_ranks) : num_ranks_(num_ranks) {}

  Flags Take() {
    std::lock_guard lock(mutex_);
    if (spare_.empty()) return std::make_unique<RankFlags[]>(static_cast<size_t>(num_ranks_));
    Flags flags = std::move(spare_.back());
    spare_.pop_back();
    return flags;
  }

  void Give(Flags flags) {
    std::lock_guard lock(mutex_);
    spare_.push_back(std::move(flags));
  }

 private:
  const int32_t num_ranks_;
  std::mutex mutex_;
  std::vector<Flags> spare_;
};

}  // namespace einsummable::cpu
