// Feeds the decoder of exchange programs with random numbers and with sound programs that have been tampered with, to
// be built with AddressSanitizer and UndefinedBehaviorSanitizer: it must refuse or accept, but never access what it
// should not. What it accepts is scheduled and, if it is small, run on buffers of just the sizes that it claims.
//
//   decode_check SEED ITERATIONS
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checks/programs.h"
#include "core/program.h"
#include "core/schedule.h"
#include "cpu/flags.h"
#include "cpu/tasks.h"

namespace einsummable::checks {
namespace {

using Numbers = std::vector<int64_t>;

// Splitmix64, by Steele, Lea and Flood.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

constexpr int64_t kMaxRunBytes = 1 << 16;

int64_t Below(Random& random, size_t bound) { return static_cast<int64_t>(random() % bound); }

// A transposition of a matrix of `rows` times 3 between two devices, of which the first also keeps a reversed sum.
Numbers Strided(DType dtype, int64_t rows) {
  const int64_t n = rows * 3;
  const int64_t sum = static_cast<int64_t>(Admits(Monoid::kSum, dtype) ? Monoid::kSum : Monoid::kMax);
  return {kMagic, kVersion, static_cast<int64_t>(dtype), 2, 2,
          1, n, 1, n, 1, n,  // device 0: input, output, scratch
          1, n, 1, n, 1, n,
          2,
          0, 2, 1, rows, 3, 1, 2, 0, 0, 3, 1, 0, 0, 0, 0, 3, 1,
          sum, 2, 2, rows, 3, 0, 2, 0, 0, 1, rows, 0, 0, 0, 0, 3, 1, 1, 0, 0, 0, 3, 1,
          2,
          0, 2, 1, 3, rows, 1, 1, 0, 0, rows, 1, 1, 2, 0, 0, 1, 3,
          0, 0, 1, 0, 1, 0, 0, 0, 2, 0, n - 1};
}

std::vector<Numbers> Seeds() {
  std::vector<Numbers> seeds;
  for (const ProgramBuilder& builder : {AllGather(3, 2), AllReduce(2, 3), Ring(3, 1), StagedBroadcast(2, 4),
                                        Relay(3, 2), ProgramBuilder(2, 3, 0, 0)}) {
    seeds.push_back(builder.Encode());
  }
  for (DType dtype : {DType::kPred, DType::kS8, DType::kBF16, DType::kF32, DType::kC128, DType::kF8E4M3FN}) {
    seeds.push_back(Strided(dtype, 4));
  }
  return seeds;
}

int64_t AnyNumber(Random& random) {
  constexpr int64_t kEdges[] = {-1, kMaxElements, kMaxElements + 1, kMaxDevices, kMaxRank, kMaxRank + 1, INT32_MAX,
                                int64_t{INT32_MAX} + 1, INT64_MAX, INT64_MIN, int64_t{1} << 62};
  switch (Below(random, 4)) {
    case 0: return kEdges[Below(random, std::size(kEdges))];
    case 1: return static_cast<int64_t>(random());
    default: return Below(random, 24);
  }
}

void Tamper(Numbers& numbers, Random& random) {
  if (numbers.empty()) return;
  const auto at = numbers.begin() + Below(random, numbers.size());
  switch (Below(random, 8)) {
    case 0: *at ^= int64_t{1} << Below(random, 63); break;
    case 1: *at += Below(random, 5) - 2; break;
    case 2: *at = numbers[Below(random, numbers.size())]; break;
    case 3: numbers.insert(at, AnyNumber(random)); break;
    case 4: numbers.erase(at); break;
    case 5: numbers.resize(static_cast<size_t>(at - numbers.begin())); break;
    default: *at = AnyNumber(random); break;
  }
}

Numbers Next(const std::vector<Numbers>& seeds, Random& random) {
  Numbers numbers;
  if (Below(random, 8) == 0) {
    const Numbers& header = seeds[Below(random, seeds.size())];
    numbers.assign(header.begin(), header.begin() + Below(random, 6));
    for (int64_t left = Below(random, 60); left > 0; --left) numbers.push_back(AnyNumber(random));
    return numbers;
  }
  numbers = seeds[Below(random, seeds.size())];
  for (int64_t left = 1 + Below(random, 3); left > 0; --left) Tamper(numbers, random);
  return numbers;
}

// The bytes of all buffers and of all moves; what is no longer small counts as infinite.
double BytesOf(const Program& program) {
  double elements = 0;
  for (const auto& spaces : program.sizes) {
    for (const auto& sizes : spaces) {
      for (int64_t size : sizes) elements += static_cast<double>(size);
    }
  }
  for (const Move& move : program.moves) elements += static_cast<double>(move.elements) * (1.0 + move.sources.size());
  return elements * static_cast<double>(program.item_size);
}

void RunProgram(const Program& program, const Schedule& schedule, int32_t workers) {
  using Bytes = std::unique_ptr<char[]>;
  std::vector<Bytes> memory;
  auto make = [&](int64_t bytes) {
    memory.push_back(Bytes(new char[static_cast<size_t>(bytes)]()));
    return memory.back().get();
  };
  std::vector<std::vector<char*>> slots;
  std::vector<char* const*> ranks;
  std::vector<char*> scratch;
  for (int32_t rank = 0; rank < program.num_devices; ++rank) {
    slots.emplace_back();
    for (Space space : {Space::kInput, Space::kOutput}) {
      for (int64_t size : program.sizes[rank][static_cast<int>(space)]) {
        slots.back().push_back(make(size * program.item_size));
      }
    }
    scratch.push_back(make(schedule.view().rank(rank).scratch_bytes));
  }
  for (auto& rank : slots) ranks.push_back(rank.data());
  const auto flags = std::make_unique<cpu::RankFlags[]>(static_cast<size_t>(program.num_devices));
  for (bool stream : {false, true}) {
    const cpu::Buffers buffers = {ranks.data(), scratch.data(), stream};
    if (workers == 1) {
      cpu::RunAlone(schedule.view(), buffers);
    } else {
      cpu::Tasks(schedule.view(), flags.get(), buffers, workers).Run();
    }
  }
}

int Main(uint64_t seed, int64_t iterations) {
  Random random(seed);
  const std::vector<Numbers> seeds = Seeds();
  int64_t accepted = 0, run = 0;
  for (int64_t i = 0; i < iterations; ++i) {
    // On the heap, and no longer than it is, so that whatever is read beyond its end is noticed.
    const Numbers numbers = i < static_cast<int64_t>(seeds.size()) ? seeds[i] : Next(seeds, random);
    const auto exact = std::make_unique<int64_t[]>(numbers.size());
    std::copy(numbers.begin(), numbers.end(), exact.get());
    const auto decoded = Decode(exact.get(), numbers.size());
    if (const auto* message = std::get_if<std::string>(&decoded)) {
      if (message->rfind("malformed exchange program: ", 0) != 0 || i < static_cast<int64_t>(seeds.size())) {
        std::printf("iteration %lld: %s\n", static_cast<long long>(i), message->c_str());
        return 1;
      }
      continue;
    }
    ++accepted;
    const Program& program = *std::get<0>(decoded);
    const bool small = BytesOf(program) <= kMaxRunBytes;
    if (!small && accepted % 16 != 0) continue;
    const Schedule schedule(program, {i % 2 == 0 ? Copies::kPull : Copies::kPush, int64_t{1} << (i % 20)});
    if (!small) continue;
    RunProgram(program, schedule, static_cast<int32_t>(1 + i % 3));
    ++run;
  }
  std::printf("%lld programs: %lld accepted, %lld run\n", static_cast<long long>(iterations),
              static_cast<long long>(accepted), static_cast<long long>(run));
  return 0;
}

}  // namespace
}  // namespace einsummable::checks

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const int64_t iterations = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 20'000;
  return einsummable::checks::Main(seed, iterations);
}
