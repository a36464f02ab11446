// Memory as the C++ model lets threads see it, small enough to enumerate: release, acquire and relaxed atomics, and
// plain cells, of which unordered accesses are errors.
//
// An atomic location is the list of all values stored to it. A thread may read any of them that is not older than what
// it already knows of the location: it may go on seeing an old value while others see a new one. What a thread knows is
// its view; a release store carries the view of the storing thread, and an acquire load that reads it takes that over.
// An addition reads the latest value and carries on the view that came with it (a release sequence). This is the
// operational form of the release/acquire fragment of RC11 (Lahav et al., PLDI 2017; Kang et al., POPL 2017), where a
// store goes to the end of its location's list: exact here, since no two unordered stores go to one location.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace einsummable::checks {

// Thrown where a plain cell is accessed by two threads without an order, or holds what it should not.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For each thread, up to which of its steps one has heard of it; for each atomic, the oldest value one may read.
using View = std::vector<uint16_t>;

inline void Join(View& view, const View& other) {
  for (size_t i = 0; i < view.size(); ++i) view[i] = std::max(view[i], other[i]);
}

struct Value {
  uint64_t value;
  View view;  // what whoever acquires it learns
};

// A location of plain memory.
struct Cell {
  uint64_t value = 0;
  uint16_t writer = 0, written = 0;  // the thread that wrote last, and at which of its steps
  std::vector<uint16_t> reads;       // by thread, its last step that read
};

class WeakMemory {
 public:
  WeakMemory(int num_threads, int num_atomics, int num_cells)
      : num_threads_(num_threads), views_(num_threads, View(num_threads + num_atomics)), atomics_(num_atomics),
        cells_(num_cells) {
    for (auto& atomic : atomics_) atomic.push_back({0, View(num_threads + num_atomics)});
    for (Cell& cell : cells_) cell.reads.resize(num_threads);
  }

  // The values of an atomic that the thread may read; number 0 is the oldest.
  int NumReadable(int thread, int atomic) const {
    return static_cast<int>(atomics_[atomic].size()) - views_[thread][num_threads_ + atomic];
  }

  uint64_t Load(int thread, int atomic, int choice, bool acquire) {
    View& view = views_[thread];
    uint16_t& oldest = view[num_threads_ + atomic];
    oldest = static_cast<uint16_t>(oldest + choice);
    const Value& read = atomics_[atomic][oldest];
    if (acquire) Join(view, read.view);
    return read.value;
  }

  void Store(int thread, int atomic, uint64_t value, bool release) { Append(thread, atomic, value, release, nullptr); }

  uint64_t Add(int thread, int atomic, uint64_t amount, bool ordered) {
    const Value last = atomics_[atomic].back();
    if (ordered) Join(views_[thread], last.view);
    Append(thread, atomic, last.value + amount, ordered, &last.view);
    return last.value + amount;
  }

  uint64_t Read(int thread, int cell, const std::string& name) {
    CheckWritten(thread, cells_[cell], name);
    cells_[cell].reads[thread] = views_[thread][thread];
    return cells_[cell].value;
  }

  void Write(int thread, int cell, uint64_t value, const std::string& name) {
    Cell& written = cells_[cell];
    CheckWritten(thread, written, name);
    for (int other = 0; other < num_threads_; ++other) {
      if (written.reads[other] > views_[thread][other]) {
        throw Violation(name + " is written by thread " + std::to_string(thread) + " while thread " +
                        std::to_string(other) + " may still read it");
      }
    }
    written.value = value;
    written.writer = static_cast<uint16_t>(thread);
    written.written = views_[thread][thread];
  }

  // To be called before each step of a thread: what it does is not known to others before they acquire it.
  void Step(int thread) { ++views_[thread][thread]; }

  template <typename Sink>
  void Describe(Sink&& sink) const {
    for (const View& view : views_) sink(view.data(), view.size() * sizeof(view[0]));
    for (const auto& atomic : atomics_) {
      for (const Value& value : atomic) {
        sink(&value.value, sizeof(value.value));
        sink(value.view.data(), value.view.size() * sizeof(value.view[0]));
      }
    }
    for (const Cell& cell : cells_) {
      sink(&cell.value, sizeof(cell.value));
      sink(&cell.writer, sizeof(cell.writer));
      sink(&cell.written, sizeof(cell.written));
      sink(cell.reads.data(), cell.reads.size() * sizeof(cell.reads[0]));
    }
  }

 private:
  void Append(int thread, int atomic, uint64_t value, bool release, const View* carried) {
    View& view = views_[thread];
    view[num_threads_ + atomic] = static_cast<uint16_t>(atomics_[atomic].size());
    View published(view.size());
    if (release) published = view;
    if (carried != nullptr) Join(published, *carried);
    atomics_[atomic].push_back({value, published});
  }

  void CheckWritten(int thread, const Cell& cell, const std::string& name) const {
    if (cell.written <= views_[thread][cell.writer]) return;
    throw Violation(name + " is accessed by thread " + std::to_string(thread) + " while thread " +
                    std::to_string(cell.writer) + " may still write it");
  }

  int num_threads_;
  std::vector<View> views_;  // by thread
  std::vector<std::vector<Value>> atomics_;
  std::vector<Cell> cells_;
};

}  // namespace einsummable::checks
