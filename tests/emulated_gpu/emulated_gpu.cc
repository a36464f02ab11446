#include <fcntl.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda.h"
#include "cuda_runtime_api.h"

thread_local dim3 threadIdx, blockIdx, blockDim;

namespace emulated_gpu {
namespace {

constexpr int kDevices = 8;
constexpr int kMultiprocessors = 4;
constexpr unsigned kMaxThreads = 6;  // of a block; no power of two, as nothing may count on one
constexpr size_t kStackBytes = 256 << 10;

thread_local int current_device = 0;

// ---- Kernels ------------------------------------------------------------------------------------------------

// The block that this thread of the host runs. Its threads take turns: at a barrier, and whenever one looks at a flag.
struct Block {
  enum class State { kRuns, kWaits, kDone };

  struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    State state = State::kRuns;
  };

  std::function<void()> thread;
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  unsigned running = 0;
  int predicate = 1, agreed = 1;

  void Switch(State state) {
    Fiber& fiber = fibers[running];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler);
  }
};

thread_local Block* block = nullptr;

void RunFiber() {
  block->thread();
  block->Switch(Block::State::kDone);
}

void RunBlock(unsigned number, unsigned threads, const std::function<void()>& thread) {
  Block state;
  block = &state;
  state.thread = thread;
  state.fibers.resize(threads);
  blockIdx.x = number;
  blockDim.x = threads;
  for (auto& fiber : state.fibers) {
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, RunFiber, 0);
  }
  auto count = [&](Block::State wanted) {
    return std::count_if(state.fibers.begin(), state.fibers.end(), [=](const auto& f) { return f.state == wanted; });
  };
  while (count(Block::State::kDone) < static_cast<std::ptrdiff_t>(threads)) {
    for (unsigned i = 0; i < threads; ++i) {
      if (state.fibers[i].state != Block::State::kRuns) continue;
      state.running = threadIdx.x = i;
      swapcontext(&state.scheduler, &state.fibers[i].context);
    }
    if (count(Block::State::kRuns) > 0) continue;
    if (count(Block::State::kWaits) > 0 && count(Block::State::kDone) > 0) {
      Trap("some threads of a block end where others wait");
    }
    state.agreed = std::exchange(state.predicate, 1);
    for (auto& fiber : state.fibers) {
      if (fiber.state == Block::State::kWaits) fiber.state = Block::State::kRuns;
    }
  }
  block = nullptr;
}

void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  std::vector<std::thread> running;
  for (unsigned i = 0; i < blocks; ++i) running.emplace_back([=, &thread] { RunBlock(i, threads, thread); });
  for (auto& one : running) one.join();
}

}  // namespace

// ---- Streams, events, graphs --------------------------------------------------------------------------------

struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  uint64_t at_ns = 0;

  void Set() {
    std::lock_guard lock(mutex);
    done = true;
    at_ns = ClockNs();
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};

// What is captured: for each stream its operations. Signals are numbered, and made anew for each launch.
struct Graph {
  struct Operation {
    std::function<void()> work;
    int set = -1, wait = -1;
  };
  std::map<Stream*, std::vector<Operation>> branches;
  int num_signals = 0;

  void Run() const {
    std::vector<Signal> signals(static_cast<size_t>(num_signals));
    std::vector<std::thread> running;
    for (const auto& [stream, operations] : branches) {
      running.emplace_back([&signals, &operations] {
        for (const Operation& operation : operations) {
          if (operation.wait >= 0) signals[static_cast<size_t>(operation.wait)].Wait();
          if (operation.work) operation.work();
          if (operation.set >= 0) signals[static_cast<size_t>(operation.set)].Set();
        }
      });
    }
    for (auto& one : running) one.join();
  }
};

struct Event {
  std::shared_ptr<Signal> signal = std::make_shared<Signal>();
  Graph* capture = nullptr;
  int number = -1;
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool busy = false, ending = false, immediate = false;
  Graph* capture = nullptr;
  std::thread worker{[this] { Work(); }};

  void Work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return ending || !tasks.empty(); });
      if (tasks.empty()) return;
      auto task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      task();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
  void Add(std::function<void()> task) {
    if (capture != nullptr) {
      capture->branches[this].push_back({std::move(task)});
      return;
    }
    if (immediate) return task();
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !busy && tasks.empty(); });
  }
};

void Yield() {
  std::this_thread::yield();
  block->Switch(Block::State::kRuns);
}

uint64_t ClockNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void Trap(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::abort();
}

Stream* ImmediateStream() {
  auto* const stream = new Stream;
  stream->immediate = true;
  return stream;
}

cudaError_t Enqueue(Stream* stream, unsigned blocks, unsigned threads, std::function<void()> thread) {
  stream->Add([=, thread = std::move(thread)] { RunGrid(blocks, std::min(threads, kMaxThreads), thread); });
  return cudaSuccess;
}

// ---- Memory ---------------------------------------------------------------------------------------------------

namespace {

// Large ones, as the engine's arena has them, are in files without names, which other processes find among the files that
// this one has open.
constexpr size_t kSharedBytes = 1 << 20;

struct Allocation {
  size_t bytes;
  int file;  // -1 for a small one
};

std::mutex memory_mutex;
std::map<char*, Allocation> allocations;

void* Mapped(size_t bytes, int file) {
  const int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
}

}  // namespace
}  // namespace emulated_gpu

using namespace emulated_gpu;

int __syncthreads_and(int predicate) {
  block->predicate = block->predicate && predicate;
  block->Switch(Block::State::kWaits);
  return block->agreed;
}

void __nanosleep(unsigned ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidValue;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulated", kMultiprocessors, 1};
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = kMultiprocessors;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  static std::atomic<int> calls{0};
  return calls++ % 2 == 0 ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorName(cudaError_t) { return "error"; }

const char* cudaGetErrorString(cudaError_t) { return "of an emulated GPU"; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  std::lock_guard lock(memory_mutex);
  const int file = bytes >= kSharedBytes ? memfd_create("emulated_gpu", MFD_CLOEXEC) : -1;
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) return cudaErrorMemoryAllocation;
  void* const mapped = Mapped(bytes, file);
  if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
  allocations[static_cast<char*>(mapped)] = {bytes, file};
  *memory = mapped;
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  std::lock_guard lock(memory_mutex);
  const auto entry = allocations.find(static_cast<char*>(memory));
  if (entry == allocations.end()) return cudaErrorInvalidValue;
  if (entry->second.file >= 0) close(entry->second.file);
  munmap(memory, entry->second.bytes);
  allocations.erase(entry);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stream->Add([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAccess(cudaMemAccessFlags* flags, cudaMemPool_t, cudaMemLocation*) {
  *flags = cudaMemAccessFlagsProtReadWrite;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }

CUresult cuPointerGetAttribute(void*, CUpointer_attribute, CUdeviceptr) { return CUDA_ERROR_INVALID_VALUE; }

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) { return CUDA_ERROR_INVALID_VALUE; }

CUresult cuMemRelease(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }

CUresult cuMemGetAccess(unsigned long long*, const CUmemLocation*, CUdeviceptr) { return CUDA_ERROR_INVALID_VALUE; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string, void*> functions = {
      {"cuPointerGetAttribute", reinterpret_cast<void*>(cuPointerGetAttribute)},
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(cuMemRetainAllocationHandle)},
      {"cuMemRelease", reinterpret_cast<void*>(cuMemRelease)},
      {"cuMemGetAccess", reinterpret_cast<void*>(cuMemGetAccess)},
  };
  *function = functions.at(name);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  std::lock_guard lock(memory_mutex);
  const auto entry = allocations.find(static_cast<char*>(memory));
  if (entry == allocations.end() || entry->second.file < 0) return cudaErrorInvalidValue;
  *handle = {};
  std::snprintf(handle->reserved, sizeof(handle->reserved), "/proc/%d/fd/%d", static_cast<int>(getpid()),
                entry->second.file);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  const int file = open(handle.reserved, O_RDWR);
  if (file < 0) return cudaErrorInvalidValue;
  const off_t bytes = lseek(file, 0, SEEK_END);
  *memory = Mapped(static_cast<size_t>(bytes), file);
  close(file);
  return *memory == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new Stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard lock(stream->mutex);
    stream->ending = true;
    stream->changed.notify_all();
  }
  stream->worker.join();
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->Wait();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event->capture != nullptr) {
    stream->capture = event->capture;
    Graph::Operation wait;
    wait.wait = event->number;
    stream->capture->branches[stream].push_back(std::move(wait));
    return cudaSuccess;
  }
  stream->Add([signal = event->signal] { signal->Wait(); });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->capture = new Graph;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->capture;
  for (auto& [branch, operations] : (*graph)->branches) branch->capture = nullptr;
  stream->capture = nullptr;
  return cudaSuccess;
}

struct cudaGraphExec {
  Graph graph;
};

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new cudaGraphExec{*graph};
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  stream->Add([executable] { executable->graph.Run(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream->capture != nullptr) {
    event->capture = stream->capture;
    event->number = stream->capture->num_signals++;
    Graph::Operation set;
    set.set = event->number;
    stream->capture->branches[stream].push_back(std::move(set));
    return cudaSuccess;
  }
  stream->Add([signal = event->signal] { signal->Set(); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->signal->Wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = static_cast<float>(static_cast<double>(end->signal->at_ns - begin->signal->at_ns) / 1e6);
  return cudaSuccess;
}
