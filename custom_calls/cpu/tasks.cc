#include "cpu/tasks.h"

#include <thread>

#include "cpu/float_mode.h"

namespace einsummable::cpu {

Tasks::Tasks(const ScheduleView& schedule, RankFlags* flags, const Buffers& buffers, int32_t workers_per_rank) {
  tasks_.reserve(static_cast<size_t>(schedule.header().num_participants * workers_per_rank));
  for (int32_t rank = 0; rank < schedule.header().num_ranks; ++rank) {
    if (!schedule.Participates(rank)) continue;
    for (int32_t worker = 0; worker < workers_per_rank; ++worker) {
      tasks_.emplace_back(Worker<Memory>(schedule, rank, worker, workers_per_rank),
                          Memory(buffers, flags, rank));
    }
  }
  left_.store(tasks_.size(), std::memory_order_relaxed);
}

bool Tasks::Run() {
  const FloatMode mode(Denormals::kKeep);
  uint64_t idle = 0;  // tasks looked at in a row that other threads have, or that wait for what other threads do
  while (left_.load(std::memory_order_acquire) > 0) {
    if (idle >= tasks_.size()) {
      std::this_thread::yield();
      idle = 0;
    }
    Task& task = tasks_[next_.fetch_add(1, std::memory_order_relaxed) % tasks_.size()];
    ++idle;
    if (task.taken.load(std::memory_order_relaxed) || task.taken.exchange(true, std::memory_order_acquire)) continue;
    const int32_t phase = task.worker.phase();
    if (task.worker.Advance(task.memory) == Outcome::kDone) {
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) return true;
      idle = 0;
      continue;  // the task stays taken
    }
    if (task.worker.phase() != phase) idle = 0;
    task.taken.store(false, std::memory_order_release);
  }
  return false;
}

void RunAlone(const ScheduleView& schedule, const Buffers& buffers) {
  const FloatMode mode(Denormals::kKeep);
  thread_local std::vector<Worker<OneThreadMemory>> workers;  // kept for its memory
  workers.clear();
  for (int32_t rank = 0; rank < schedule.header().num_ranks; ++rank) {
    if (schedule.Participates(rank)) workers.emplace_back(schedule, rank, 0, 1);
  }
  OneThreadMemory memory(buffers);
  for (int32_t end_round = 0; end_round < schedule.header().num_steps; ++end_round) {
    for (Worker<OneThreadMemory>& worker : workers) worker.Advance(memory, end_round);
  }
}

}  // namespace einsummable::cpu
