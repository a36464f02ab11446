// What the engine has done, per exchange and rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace einsummable::cpu {

struct Counter {
  int64_t exchange_id;
  int64_t rank;
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> bytes_received{0};  // read from other ranks' buffers, counted once copied

  Counter(int64_t exchange_id, int64_t rank) : exchange_id(exchange_id), rank(rank) {}
};

// The counters of ranks 0 to num_ranks - 1 of an exchange; they live as long as the process.
std::vector<Counter*> CountersOf(int64_t exchange_id, int64_t num_ranks);

struct CounterValue {
  int64_t exchange_id, rank, calls, bytes_received;
};

// The counters of every call made since the last reset, ordered by exchange and rank.
std::vector<CounterValue> ReadCounters();

void ResetCounters();

}  // namespace einsummable::cpu
