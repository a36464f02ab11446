#include "cpu/memory.h"

#include <vector>

#include "cpu/kernels.h"

namespace einsummable::cpu {
namespace {

constexpr int32_t kFew = 64;

void Bind(const ScheduleView& schedule, const FlatMove& move, const Buffers& buffers, const char** sources,
          const int64_t** strides) {
  for (int32_t i = 0; i < move.num_sources; ++i) {
    const FlatSlice& source = schedule.source(move, i);
    sources[i] = buffers.At(source);
    strides[i] = schedule.numbers(source.strides);
  }
}

}  // namespace

void RunOtherPart(const ScheduleView& schedule, const FlatPart& part, const Buffers& buffers) {
  static const RunFn run = BestRun();
  const FlatMove& move = schedule.move(part.move);
  const FlatSlice& destination = schedule.destination(move);
  const char* few_sources[kFew];
  const int64_t* few_strides[kFew];
  std::vector<const char*> many_sources;
  std::vector<const int64_t*> many_strides;
  const char** sources = few_sources;
  const int64_t** strides = few_strides;
  if (move.num_sources > kFew) {
    many_sources.resize(move.num_sources);
    many_strides.resize(move.num_sources);
    sources = many_sources.data();
    strides = many_strides.data();
  }
  Bind(schedule, move, buffers, sources, strides);
  const BoundMove bound = {static_cast<Monoid>(move.monoid),
                           static_cast<DType>(schedule.header().dtype),
                           move.rank,
                           move.num_sources,
                           schedule.numbers(move.extents),
                           move.contiguous != 0,
                           buffers.At(destination),
                           schedule.numbers(destination.strides),
                           sources,
                           strides};
  run(bound, part.begin, part.end, buffers.stream);
}

}  // namespace einsummable::cpu
