// The workers of all ranks of one call, taken up by whichever threads have time.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/interpreter.h"
#include "cpu/flags.h"
#include "cpu/memory.h"

namespace einsummable::cpu {

class Tasks {
 public:
  Tasks(const ScheduleView& schedule, RankFlags* flags, const Buffers& buffers, int32_t workers_per_rank);

  // Advances workers, together with other threads that do the same, until all are done. True in one of these threads.
  bool Run();

 private:
  struct Task {
    Worker<Memory> worker;
    Memory memory;
    std::atomic<bool> taken{false};

    Task(const Worker<Memory>& worker, const Memory& memory) : worker(worker), memory(memory) {}
    Task(const Task& other) : worker(other.worker), memory(other.memory) {}
  };

  std::vector<Task> tasks_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> left_;
};

// Runs the moves by this thread alone, round after round.
void RunAlone(const ScheduleView& schedule, const Buffers& buffers);

}  // namespace einsummable::cpu
