#include "cuda/peers.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <sstream>

#include "cuda/check.h"
#include "cuda/kernels.h"

namespace einsummable::cuda {
namespace {

constexpr int kWords = 1024;
constexpr size_t kRegionBytes = kWords * sizeof(uint32_t);
constexpr size_t kMaxKnown = 1024;

constexpr char kRemedy[] =
    ". Peer access between GPUs needs NVLink, or PCIe with access control (ACS) and the IOMMU off or passed through "
    "(kernel parameters iommu=pt or amd_iommu=off, or the firmware's settings)";

std::vector<uint32_t> Words(uint32_t pattern) {
  std::vector<uint32_t> words(kWords);
  for (int i = 0; i < kWords; ++i) words[i] = pattern + static_cast<uint32_t>(i);
  return words;
}

// Says what differs from `Words(pattern)`, or nothing.
std::string Difference(const std::vector<uint32_t>& words, uint32_t pattern, const std::string& what) {
  const std::vector<uint32_t> expected = Words(pattern);
  const auto [found, wanted] = std::mismatch(words.begin(), words.end(), expected.begin());
  if (found == words.end()) return "";
  std::ostringstream message;
  message << what << ": word " << found - words.begin() << " is " << std::hex << *found << ", expected " << *wanted
          << kRemedy;
  return message.str();
}

std::string Named(const Device& device) {
  return "GPU " + std::to_string(device.ordinal()) + " (" + device.name() + ")";
}

// Another one for each probe, so that what an earlier one left is not taken for this one's.
uint32_t NextPattern() {
  static std::atomic<uint32_t> patterns{0x5eed0000};
  return patterns.fetch_add(0x10001);
}

uint32_t BoardPattern(int participant) { return 0xb0a2d000u + static_cast<uint32_t>(participant) * 0x10001u; }

std::string EnableAccess(Device& from, Device& to) {
  const DeviceScope scope(from.ordinal());
  int can = 0;
  EINSUMMABLE_CHECK_CUDA(cudaDeviceCanAccessPeer(&can, from.ordinal(), to.ordinal()));
  if (can == 0) return Named(from) + " cannot reach the memory of " + Named(to) + kRemedy;
  const cudaError_t error = cudaDeviceEnablePeerAccess(to.ordinal(), 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return "";
  }
  EINSUMMABLE_CHECK_CUDA(error);
  return "";
}

template <typename Function>
Function* DriverFunction(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  EINSUMMABLE_CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) throw CudaError(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function*>(function);
}

template <typename Value>
Value PointerAttribute(CUpointer_attribute attribute, const void* address) {
  static const auto get = DriverFunction<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute");
  Value value = {};
  if (get(&value, attribute, reinterpret_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) return Value{};
  return value;
}

void EnsurePoolAccess(cudaMemPool_t pool, const Device& peer) {
  cudaMemLocation location = {};
  location.type = cudaMemLocationTypeDevice;
  location.id = peer.ordinal();
  cudaMemAccessFlags flags = cudaMemAccessFlagsProtNone;
  EINSUMMABLE_CHECK_CUDA(cudaMemPoolGetAccess(&flags, pool, &location));
  if (flags == cudaMemAccessFlagsProtReadWrite) return;
  cudaMemAccessDesc access = {};
  access.location = location;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  EINSUMMABLE_CHECK_CUDA(cudaMemPoolSetAccess(pool, &access, 1));
}

// Whether the memory is mapped page by page (`cuMemMap`), for each device that may use it.
bool IsMapped(const void* address) {
  static const auto retain = DriverFunction<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  static const auto release = DriverFunction<decltype(cuMemRelease)>("cuMemRelease");
  CUmemGenericAllocationHandle handle;
  if (retain(&handle, const_cast<void*>(address)) != CUDA_SUCCESS) return false;
  release(handle);
  return true;
}

void EnsureMappedAccess(const void* address, const Device& device, const Device& peer) {
  static const auto get = DriverFunction<decltype(cuMemGetAccess)>("cuMemGetAccess");
  CUmemLocation location = {};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = peer.ordinal();
  unsigned long long flags = 0;
  const CUresult result = get(&flags, &location, reinterpret_cast<CUdeviceptr>(address));
  if (result == CUDA_SUCCESS && flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return;
  throw CudaError("buffers on " + Named(device) + " are not mapped for " + Named(peer) +
                  ": let JAX allocate memory its usual way (unset XLA_PYTHON_CLIENT_ALLOCATOR)");
}

}  // namespace

std::string ProbePeer(Device& from, Device& to) {
  if (std::string problem = EnableAccess(from, to); !problem.empty()) return problem;
  const auto take = [](Device& device, size_t bytes) {
    const DeviceScope scope(device.ordinal());
    return device.arena().Take(bytes);
  };
  const Arena::Block theirs = take(to, 2 * kRegionBytes), ours = take(from, kRegionBytes);
  const uint32_t written = NextPattern(), known = NextPattern();
  to.CopyIn(theirs.address + kRegionBytes, Words(known).data(), kRegionBytes);
  {
    const DeviceScope scope(from.ordinal());
    LaunchProbe(reinterpret_cast<uint32_t*>(theirs.address),
                reinterpret_cast<const uint32_t*>(theirs.address + kRegionBytes),
                reinterpret_cast<uint32_t*>(ours.address), kWords, written, from.stream());
    EINSUMMABLE_CHECK_CUDA(cudaStreamSynchronize(from.stream()));
  }
  std::vector<uint32_t> arrived(kWords), read(kWords);
  to.CopyOut(arrived.data(), theirs.address, kRegionBytes);
  from.CopyOut(read.data(), ours.address, kRegionBytes);
  to.arena().Give(theirs);
  from.arena().Give(ours);
  const std::string problem =
      Difference(arrived, written, "what " + Named(from) + " writes to " + Named(to) + " does not arrive");
  if (!problem.empty()) return problem;
  return Difference(read, known, "what " + Named(from) + " reads from " + Named(to) + " is not what is there");
}

ProbeBoard::ProbeBoard(Device& device, int participant, int num_participants)
    : device_(device), participant_(participant) {
  const DeviceScope scope(device.ordinal());
  block_ = device.arena().Take((1 + static_cast<size_t>(num_participants)) * kRegionBytes);
  local_ = device.arena().Take(kRegionBytes);
  std::vector<uint32_t> words = Words(BoardPattern(participant));
  words.resize((1 + static_cast<size_t>(num_participants)) * kWords);
  device.CopyIn(block_.address, words.data(), words.size() * sizeof(uint32_t));
}

ProbeBoard::~ProbeBoard() {
  device_.arena().Give(block_);
  device_.arena().Give(local_);
}

std::string ProbeBoard::Try(int other, char* remote) {
  const DeviceScope scope(device_.ordinal());
  LaunchProbe(reinterpret_cast<uint32_t*>(remote + (1 + static_cast<size_t>(participant_)) * kRegionBytes),
              reinterpret_cast<const uint32_t*>(remote), reinterpret_cast<uint32_t*>(local_.address), kWords,
              BoardPattern(participant_), device_.stream());
  EINSUMMABLE_CHECK_CUDA(cudaStreamSynchronize(device_.stream()));
  std::vector<uint32_t> read(kWords);
  device_.CopyOut(read.data(), local_.address, kRegionBytes);
  return Difference(read, BoardPattern(other),
                    "what process " + std::to_string(participant_) + " reads from process " + std::to_string(other) +
                        " is not what is there");
}

std::string ProbeBoard::Verify(int other) {
  std::vector<uint32_t> arrived(kWords);
  device_.CopyOut(arrived.data(), block_.address + (1 + static_cast<size_t>(other)) * kRegionBytes, kRegionBytes);
  return Difference(arrived, BoardPattern(other),
                    "what process " + std::to_string(other) + " writes to process " + std::to_string(participant_) +
                        " does not arrive");
}

void Reach::Ensure(const Device& device, const void* address, const std::vector<Device*>& peers) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(mutex_);
  for (const Device* peer : peers) {
    if (peer == nullptr || peer == &device) continue;
    const bool known = std::any_of(known_.begin(), known_.end(), [&](const Known& range) {
      return range.peer == peer && range.begin <= place && place < range.end;
    });
    if (known) continue;
    if (auto pool = PointerAttribute<cudaMemPool_t>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address)) {
      EnsurePoolAccess(pool, *peer);
    } else if (IsMapped(address)) {
      EnsureMappedAccess(address, device, *peer);
    }
    if (known_.size() >= kMaxKnown) known_.clear();  // an allocator that frees and allocates all the time
    const auto begin = PointerAttribute<uintptr_t>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address);
    const auto bytes = PointerAttribute<size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address);
    known_.push_back({peer, begin, begin + bytes});
  }
}

}  // namespace einsummable::cuda
