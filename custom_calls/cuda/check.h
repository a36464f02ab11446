// Errors of the CUDA runtime as exceptions, which the entry points turn into what their callers expect.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace einsummable::cuda {

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void CheckCall(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or it would be reported again, to somebody else
  throw CudaError(std::string(call) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

#define EINSUMMABLE_CHECK_CUDA(call) ::einsummable::cuda::CheckCall(call, #call)

}  // namespace einsummable::cuda
