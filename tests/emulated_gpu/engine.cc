// The whole CUDA engine but its XLA handlers, and the emulated GPUs that it runs on. In one go: that takes two thirds of the
// time of one file after the other.
#include "core/float8.cc"
#include "core/program.cc"
#include "core/schedule.cc"
#include "cuda/c_api.cc"
#include "cuda/channel.cc"
#include "cuda/device.cc"
#include "cuda/engine.cc"
#include "cuda/ipc.cc"
#include "cuda/kernels.cu"
#include "cuda/peers.cc"
#include "cuda/runtime_api.cc"
#include "emulated_gpu.cc"
