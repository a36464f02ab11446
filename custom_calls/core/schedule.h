// How a program is run: which rank executes each move, in which parts, and what each rank waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/program.h"
#include "core/schedule_view.h"

namespace einsummable {

// The rank that executes a copy; an aggregation is always executed by the rank of its destination.
enum class Copies {
  kPull,  // that of the destination
  kPush,  // that of the source
};

struct ScheduleOptions {
  Copies copies = Copies::kPull;
  int64_t part_bytes = 256 << 10;  // about how much one part reads and writes
};

// Owns the block that a `ScheduleView` reads.
class Schedule {
 public:
  Schedule(const Program& program, const ScheduleOptions& options);

  ScheduleView view() const { return ScheduleView(block_.get()); }
  const char* data() const { return block_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<char[]> block_;
  size_t size_;
};

}  // namespace einsummable
