// Scratch memory of the engine, kept between exchanges.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "cpu/huge_pages.h"

namespace einsummable::cpu {

// Blocks of scratch memory; a block given back is handed out again to the next exchange that fits.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kMaxKeptBytes = size_t{256} << 20;

  // A block of at least `bytes`; throws std::bad_alloc when there is no memory.
  std::pair<char*, size_t> Take(size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      size_t best = free_.size();
      for (size_t i = 0; i < free_.size(); ++i) {
        if (free_[i].second >= bytes && (best == free_.size() || free_[i].second < free_[best].second)) best = i;
      }
      if (best < free_.size()) {
        auto block = free_[best];
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
        kept_bytes_ -= block.second;
        return block;
      }
    }
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    char* data = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
    if (data == nullptr) throw std::bad_alloc();
    AdviseHugePages(data, static_cast<int64_t>(rounded));
    return {data, rounded};
  }

  void Give(std::pair<char*, size_t> block) {
    {
      std::lock_guard lock(mutex_);
      if (kept_bytes_ + block.second <= kMaxKeptBytes) {
        kept_bytes_ += block.second;
        free_.push_back(block);
        return;
      }
    }
    std::free(block.first);
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<char*, size_t>> free_;
  size_t kept_bytes_ = 0;
};

}  // namespace einsummable::cpu
