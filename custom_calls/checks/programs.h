// Small exchange programs for the checks, written as `encode.py` would.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/program.h"

namespace einsummable::checks {

// `count` elements of one buffer from `offset` on.
struct Piece {
  int64_t device;
  Space space;
  int64_t buffer, offset;
};

class ProgramBuilder {
 public:
  // Every rank has the same buffers, one of each space that has a size.
  ProgramBuilder(int64_t ranks, int64_t input, int64_t output, int64_t scratch, DType dtype = DType::kS64)
      : ranks_(ranks), sizes_{input, output, scratch}, dtype_(dtype) {}

  ProgramBuilder& Round() {
    rounds_.emplace_back();
    return *this;
  }

  ProgramBuilder& Move(const Piece& destination, const std::vector<Piece>& sources, int64_t count) {
    std::vector<int64_t>& numbers = rounds_.back().numbers;
    const Monoid monoid = sources.size() > 1 ? Monoid::kSum : Monoid::kCopy;
    numbers.insert(numbers.end(), {static_cast<int64_t>(monoid), 1, static_cast<int64_t>(sources.size()), count});
    auto add = [&](const Piece& p) {
      numbers.insert(numbers.end(), {p.device, static_cast<int64_t>(p.space), p.buffer, p.offset, 1});
    };
    add(destination);
    for (const Piece& source : sources) add(source);
    ++rounds_.back().moves;
    return *this;
  }

  std::vector<int64_t> Encode() const {
    std::vector<int64_t> numbers = {kMagic, kVersion, static_cast<int64_t>(dtype_), ranks_,
                                    static_cast<int64_t>(rounds_.size())};
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      for (int64_t size : sizes_) {
        if (size == 0) {
          numbers.push_back(0);
        } else {
          numbers.insert(numbers.end(), {1, size});
        }
      }
    }
    for (const auto& round : rounds_) {
      numbers.push_back(round.moves);
      numbers.insert(numbers.end(), round.numbers.begin(), round.numbers.end());
    }
    return numbers;
  }

  std::unique_ptr<const Program> Build() const {
    const std::vector<int64_t> numbers = Encode();
    auto decoded = Decode(numbers.data(), numbers.size());
    if (auto* message = std::get_if<std::string>(&decoded)) throw std::logic_error(*message);
    return std::move(std::get<0>(decoded));
  }

 private:
  struct Moves {
    int64_t moves = 0;
    std::vector<int64_t> numbers;
  };

  int64_t ranks_;
  std::vector<int64_t> sizes_;
  DType dtype_;
  std::vector<Moves> rounds_;
};

// Every rank gets the inputs of all, `n` elements of each.
inline ProgramBuilder AllGather(int64_t ranks, int64_t n) {
  ProgramBuilder program(ranks, n, ranks * n, 0);
  program.Round();
  for (int64_t to = 0; to < ranks; ++to) {
    for (int64_t from = 0; from < ranks; ++from) {
      program.Move({to, Space::kOutput, 0, from * n}, {{from, Space::kInput, 0, 0}}, n);
    }
  }
  return program;
}

// Every rank gets the sum of all inputs: each adds up its part in scratch memory, then all take the parts from there.
inline ProgramBuilder AllReduce(int64_t ranks, int64_t n) {
  ProgramBuilder program(ranks, ranks * n, ranks * n, n);
  program.Round();
  for (int64_t owner = 0; owner < ranks; ++owner) {
    std::vector<Piece> sources;
    for (int64_t from = 0; from < ranks; ++from) sources.push_back({from, Space::kInput, 0, owner * n});
    program.Move({owner, Space::kScratch, 0, 0}, sources, n);
  }
  program.Round();
  for (int64_t to = 0; to < ranks; ++to) {
    for (int64_t owner = 0; owner < ranks; ++owner) {
      program.Move({to, Space::kOutput, 0, owner * n}, {{owner, Space::kScratch, 0, 0}}, n);
    }
  }
  return program;
}

// Rank 0 copies its input to its scratch memory, where the others fetch it.
inline ProgramBuilder StagedBroadcast(int64_t ranks, int64_t n) {
  ProgramBuilder program(ranks, n, n, n);
  program.Round().Move({0, Space::kScratch, 0, 0}, {{0, Space::kInput, 0, 0}}, n).Round();
  for (int64_t to = 1; to < ranks; ++to) {
    program.Move({to, Space::kOutput, 0, 0}, {{0, Space::kScratch, 0, 0}}, n);
  }
  return program;
}

// Each rank's input travels along the ring until all have it, through the outputs on its way.
inline ProgramBuilder Ring(int64_t ranks, int64_t n) {
  ProgramBuilder program(ranks, n, ranks * n, 0);
  program.Round();
  for (int64_t r = 0; r < ranks; ++r) program.Move({r, Space::kOutput, 0, r * n}, {{r, Space::kInput, 0, 0}}, n);
  for (int64_t hop = 1; hop < ranks; ++hop) {
    program.Round();
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t to = (r + hop) % ranks, via = (r + hop - 1) % ranks;
      program.Move({to, Space::kOutput, 0, r * n}, {{via, Space::kOutput, 0, r * n}}, n);
    }
  }
  return program;
}

// One rank: both elements of the output are the sum of those of the input, taken from scratch memory.
inline ProgramBuilder LocalSum() {
  ProgramBuilder program(1, 2, 2, 2);
  program.Round();
  for (int64_t i = 0; i < 2; ++i) program.Move({0, Space::kScratch, 0, i}, {{0, Space::kInput, 0, i}}, 1);
  program.Round();
  for (int64_t i = 0; i < 2; ++i) {
    program.Move({0, Space::kOutput, 0, i}, {{0, Space::kScratch, 0, 0}, {0, Space::kScratch, 0, 1}}, 1);
  }
  return program;
}

// Rank 0's input goes through the scratch memory of each rank to the next; the last one keeps it.
inline ProgramBuilder Relay(int64_t ranks, int64_t n) {
  ProgramBuilder program(ranks, n, n, n);
  for (int64_t r = 1; r < ranks; ++r) {
    const Piece from = {r - 1, r == 1 ? Space::kInput : Space::kScratch, 0, 0};
    program.Round().Move({r, r == ranks - 1 ? Space::kOutput : Space::kScratch, 0, 0}, {from}, n);
  }
  return program;
}

}  // namespace einsummable::checks
