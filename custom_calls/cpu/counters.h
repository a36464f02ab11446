// What the engine has done, per exchange and rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace einsummable::cpu {

struct Counter {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> bytes_received{0};  // read from other ranks' buffers, counted once copied
};

// The counters of an exchange, one for each rank.
class ExchangeCounters {
 public:
  ExchangeCounters(int64_t exchange_id, int64_t num_ranks) : exchange_id_(exchange_id), ranks_(num_ranks) {}
  ~ExchangeCounters();

  int64_t exchange_id() const { return exchange_id_; }
  Counter& operator[](int64_t rank) { return ranks_[static_cast<size_t>(rank)]; }
  int64_t num_ranks() const { return static_cast<int64_t>(ranks_.size()); }

 private:
  const int64_t exchange_id_;
  std::vector<Counter> ranks_;
};

// Those of an exchange, which all its instructions in all executables share. They are gone with the last of these:
// exchange ids are never used again, so a process that compiles on and on would otherwise grow.
std::shared_ptr<ExchangeCounters> CountersOf(int64_t exchange_id, int64_t num_ranks);

struct CounterValue {
  int64_t exchange_id, rank, calls, bytes_received;
};

// The counters of every call made since the last reset by exchanges that exist, ordered by exchange and rank.
std::vector<CounterValue> ReadCounters();

void ResetCounters();

}  // namespace einsummable::cpu
