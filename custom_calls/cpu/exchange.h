// One exchange instruction of an executable: its program and what identifies it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "core/program.h"
#include "core/schedule.h"
#include "cpu/counters.h"
#include "cpu/flags.h"

namespace einsummable::cpu {

// Exchanges that read and write more than this bypass the caches.
inline constexpr double kStreamBytes = 64 << 20;

// What one part of a large exchange reads and writes: little beside a second-level cache. Where the caches are
// bypassed, it is more: results that large are fresh memory, which the kernel clears by the huge page, and a page is
// best overwritten while the cache still has it. Every thread must find some parts to do all the same.
inline int64_t PartBytes(const Program& program) {
  constexpr int64_t kLeast = 256 << 10, kMost = 2 << 20;
  constexpr double kPartsPerThread = 16;
  const double traffic_bytes = TrafficBytes(program);
  if (traffic_bytes <= kStreamBytes) return kLeast;
  const double threads = std::max(1U, std::thread::hardware_concurrency());
  return static_cast<int64_t>(std::clamp<double>(traffic_bytes / (threads * kPartsPerThread), kLeast, kMost));
}

// Exchanges that read and write less than this are run by one thread: waking another one takes about as long.
inline constexpr double kInlineBytes = 1 << 20;

// Such that each has a few parts of the longest phase of a rank to do: threads that take them up end at about one time.
inline int32_t WorkersPerRank(const ScheduleView& schedule) {
  constexpr int32_t kPartsPerWorker = 2;
  constexpr int32_t kMaxWorkers = 64;
  if (schedule.header().traffic_bytes < kInlineBytes) return 1;
  int32_t most_parts = 0;
  for (int32_t rank = 0; rank < schedule.header().num_ranks; ++rank) {
    const Range phases = schedule.rank(rank).phases;
    for (int32_t i = phases.begin; i < phases.end; ++i) {
      most_parts = std::max(most_parts, schedule.phase(i).parts.size());
    }
  }
  return std::clamp(most_parts / kPartsPerWorker, 1, kMaxWorkers);
}

struct Exchange {
  std::unique_ptr<const Program> program;
  // Copies are executed where they read: those of one piece of memory to several ranks follow each other.
  Schedule schedule;
  int64_t id = 0;
  std::string name;      // the operation that it serves, for messages
  int64_t instance = 0;  // unique to the instruction when all ranks share it, otherwise 0
  bool has_token = false;
  std::shared_ptr<ExchangeCounters> counters;
  // Smoothed time that XLA's continuation of one rank runs in the thread that completes the rank.
  std::atomic<int64_t> continuation_ns{0};
  SpareFlags spare_flags;
  int32_t workers_per_rank;

  Exchange(std::unique_ptr<const Program> decoded, int64_t id, std::string name)
      : program(std::move(decoded)), schedule(*program, {Copies::kPush, PartBytes(*program)}), id(id),
        name(std::move(name)), counters(CountersOf(id, program->num_devices)), spare_flags(program->num_devices),
        workers_per_rank(WorkersPerRank(schedule.view())) {}

  // What messages call it.
  std::string Title() const { return "exchange " + std::to_string(id) + " (" + name + ")"; }

  bool Participates(int64_t rank) const { return schedule.view().Participates(static_cast<int32_t>(rank)); }
};

}  // namespace einsummable::cpu
