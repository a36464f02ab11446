#include "core/program.h"

#include <sstream>
#include <stdexcept>
#include <utility>

namespace einsummable {

int64_t ItemSize(DType dtype) {
  switch (dtype) {
    case DType::kPred: case DType::kS8: case DType::kU8: case DType::kF8E5M2: case DType::kF8E4M3FN:
    case DType::kF8E4M3B11FNUZ: case DType::kF8E5M2FNUZ: case DType::kF8E4M3FNUZ: case DType::kF8E4M3:
    case DType::kF8E3M4: case DType::kF8E8M0FNU:
      return 1;
    case DType::kS16: case DType::kU16: case DType::kF16: case DType::kBF16:
      return 2;
    case DType::kS32: case DType::kU32: case DType::kF32:
      return 4;
    case DType::kS64: case DType::kU64: case DType::kF64: case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
  }
  return 0;
}

bool Admits(Monoid monoid, DType dtype) {
  const bool boolean = dtype == DType::kPred;
  const bool integer = dtype >= DType::kS8 && dtype <= DType::kU64;
  switch (monoid) {
    case Monoid::kSum: case Monoid::kProd:
      return !boolean;
    case Monoid::kAnd: case Monoid::kOr:
      return boolean || integer;
    default:
      return true;
  }
}

namespace {

struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void Reject(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Malformed(message.str());
}

// Reads the encoding front to back and names what it was reading when something is out of range.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& data) : data_(data) {}

  int64_t Next(const char* what, int64_t low, int64_t high) {
    if (position_ >= data_.size()) Reject("the encoding ends at ", position_, " before the ", what);
    const int64_t value = data_[position_];
    if (value < low || value > high) {
      Reject(what, " is ", value, " at position ", position_, ", expected ", low, " to ", high);
    }
    ++position_;
    return value;
  }

  // A number of items that take at least `words` numbers each: bounded by what is left to read.
  int64_t Count(const char* what, int64_t words) {
    return Next(what, 0, static_cast<int64_t>(data_.size() - position_) / words);
  }

  const int64_t* Numbers(const char* what, int64_t count, int64_t low, int64_t high) {
    const size_t start = position_;
    for (int64_t i = 0; i < count; ++i) Next(what, low, high);
    return data_.data() + start;
  }

  size_t position() const { return position_; }
  size_t left() const { return data_.size() - position_; }

 private:
  const std::vector<int64_t>& data_;
  size_t position_ = 0;
};

Slice ReadSlice(Reader& reader, const Program& program, const Move& move, bool destination) {
  const char* what = destination ? "destination" : "source";
  const size_t position = reader.position();
  Slice slice;
  slice.device = static_cast<int32_t>(reader.Next("slice device", 0, program.num_devices - 1));
  slice.space = static_cast<Space>(reader.Next("slice space", destination ? 1 : 0, kNumSpaces - 1));
  const auto& sizes = program.sizes[slice.device][static_cast<int>(slice.space)];
  slice.buffer = static_cast<int32_t>(reader.Next("slice buffer", 0, static_cast<int64_t>(sizes.size()) - 1));
  slice.slot = slice.buffer;
  if (slice.space == Space::kOutput) {
    slice.slot += static_cast<int32_t>(program.sizes[slice.device][static_cast<int>(Space::kInput)].size());
  }
  slice.offset = reader.Next("slice offset", 0, kMaxElements);
  slice.strides = reader.Numbers("slice stride", move.rank, 1, kMaxElements);
  __int128 last = slice.offset;
  for (int32_t dim = 0; dim < move.rank; ++dim) {
    last += static_cast<__int128>(move.extents[dim] - 1) * slice.strides[dim];
  }
  if (last >= sizes[slice.buffer]) {
    Reject("the ", what, " slice at position ", position, " reaches past the ", sizes[slice.buffer],
           " elements of buffer ", slice.buffer, " of space ", static_cast<int64_t>(slice.space),
           " on device ", slice.device);
  }
  return slice;
}

Move ReadMove(Reader& reader, const Program& program, int32_t round) {
  Move move;
  move.round = round;
  move.monoid = static_cast<Monoid>(reader.Next("monoid", 0, static_cast<int64_t>(Monoid::kOr)));
  move.rank = static_cast<int32_t>(reader.Next("move rank", 0, kMaxRank));
  const int64_t num_sources = reader.Count("number of sources", 4);
  if ((move.monoid == Monoid::kCopy) != (num_sources == 1) || num_sources == 0) {
    Reject("a move of ", num_sources, " sources with monoid code ", static_cast<int64_t>(move.monoid),
           " before position ", reader.position());
  }
  if (!Admits(move.monoid, program.dtype)) {
    Reject("monoid code ", static_cast<int64_t>(move.monoid), " is not defined on dtype code ",
           static_cast<int64_t>(program.dtype));
  }
  move.extents = reader.Numbers("extent", move.rank, 1, kMaxElements);
  __int128 elements = 1;
  for (int32_t dim = 0; dim < move.rank; ++dim) {
    elements *= move.extents[dim];
    if (elements > kMaxElements) Reject("a move of too many elements before position ", reader.position());
  }
  move.elements = static_cast<int64_t>(elements);
  move.destination = ReadSlice(reader, program, move, /*destination=*/true);
  move.sources.reserve(num_sources);
  move.remote_sources = 0;
  for (int64_t i = 0; i < num_sources; ++i) {
    move.sources.push_back(ReadSlice(reader, program, move, /*destination=*/false));
    move.remote_sources += move.sources.back().device != move.destination.device;
  }
  return move;
}

void ReadSizes(Reader& reader, Program& program) {
  program.sizes.resize(program.num_devices);
  __int128 scratch = 0;
  for (auto& spaces : program.sizes) {
    for (auto& sizes : spaces) {
      const int64_t count = reader.Count("number of buffers", 1);
      const int64_t* first = reader.Numbers("buffer size", count, 0, kMaxElements);
      sizes.assign(first, first + count);
    }
    for (int64_t size : spaces[static_cast<int>(Space::kScratch)]) scratch += size;
  }
  if (scratch > kMaxElements) Reject("more than ", kMaxElements, " elements of scratch in all");
}

std::unique_ptr<const Program> Read(const int64_t* data, size_t length) {
  auto program = std::make_unique<Program>();
  if (length > INT32_MAX) Reject("the encoding has ", length, " numbers, at most ", INT32_MAX, " are supported");
  program->encoding.assign(data, data + length);
  Reader reader(program->encoding);
  reader.Next("magic number", kMagic, kMagic);
  reader.Next("format version", kVersion, kVersion);
  program->dtype = static_cast<DType>(reader.Next("dtype code", 0, 255));
  program->item_size = ItemSize(program->dtype);
  if (program->item_size == 0) {
    Reject("dtype code ", static_cast<int64_t>(program->dtype), " is not supported");
  }
  program->num_devices = static_cast<int32_t>(reader.Next("number of devices", 1, kMaxDevices));
  program->num_rounds = static_cast<int32_t>(reader.Count("number of rounds", 1));
  if (program->num_devices > static_cast<int64_t>(reader.left()) / kNumSpaces) {
    Reject("the encoding is too short for ", program->num_devices, " devices");
  }
  ReadSizes(reader, *program);
  for (int32_t round = 0; round < program->num_rounds; ++round) {
    const int64_t count = reader.Count("number of moves", 11);
    for (int64_t i = 0; i < count; ++i) program->moves.push_back(ReadMove(reader, *program, round));
  }
  if (reader.left() != 0) Reject(reader.left(), " numbers follow the end of the program");
  return program;
}

}  // namespace

int64_t ElementTraffic(const Program& program, const Move& move) {
  return program.item_size * (1 + static_cast<int64_t>(move.sources.size()));
}

double TrafficBytes(const Program& program) {
  double bytes = 0;
  for (const Move& move : program.moves) {
    bytes += static_cast<double>(move.elements) * static_cast<double>(ElementTraffic(program, move));
  }
  return bytes;
}

std::variant<std::unique_ptr<const Program>, std::string> Decode(const int64_t* data, size_t length) {
  try {
    return Read(data, length);
  } catch (const Malformed& malformed) {
    return std::string("malformed exchange program: ") + malformed.what();
  } catch (const std::bad_alloc&) {
    return std::string("malformed exchange program: it does not fit in memory");
  }
}

}  // namespace einsummable
