// One exchange instruction of an executable: its program and what identifies it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/program.h"
#include "core/schedule.h"
#include "cpu/counters.h"

namespace einsummable::cpu {

// What one part of a large exchange reads and writes: small beside a second-level cache.
inline constexpr int64_t kPartBytes = 256 << 10;

struct Exchange {
  std::unique_ptr<const Program> program;
  Schedule schedule;
  int64_t id = 0;
  std::string name;      // the operation that it serves, for messages
  int64_t instance = 0;  // unique to the instruction when all ranks share it, otherwise 0
  bool has_token = false;
  std::vector<Counter*> counters;  // by rank
  // Smoothed time that XLA's continuation of one rank runs in the thread that completes the rank.
  std::atomic<int64_t> continuation_ns{0};

  Exchange(std::unique_ptr<const Program> decoded, int64_t id, std::string name)
      : program(std::move(decoded)), schedule(MakeSchedule(*program, kPartBytes)), id(id), name(std::move(name)),
        counters(CountersOf(id, program->num_devices)) {}

  // What messages call it.
  std::string Title() const { return "exchange " + std::to_string(id) + " (" + name + ")"; }

  bool Participates(int64_t rank) const { return schedule.participates[rank]; }
};

}  // namespace einsummable::cpu
