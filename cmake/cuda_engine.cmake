# Adds the library of the CUDA engine to ENGINES, if there is a CUDA compiler that can build it.
set(OLDEST_CUDA 12.5)

include(CheckLanguage)
check_language(CUDA)
set(CUDA_PROBLEM "")
if(NOT CMAKE_CUDA_COMPILER)
  set(CUDA_PROBLEM "no CUDA compiler was found")
else()
  # The architectures are set for the target, below.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  # Versions of CMake older than the compiler do not know its flag for the language standard.
  foreach(kind STANDARD EXTENSION)
    if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
    endif()
  endforeach()
  find_package(CUDAToolkit)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS OLDEST_CUDA)
    set(CUDA_PROBLEM "the CUDA compiler is version ${CMAKE_CUDA_COMPILER_VERSION}, older than ${OLDEST_CUDA}")
  elseif(NOT TARGET CUDA::cudart_static)
    set(CUDA_PROBLEM "there is no static CUDA runtime beside the compiler ${CMAKE_CUDA_COMPILER}")
  endif()
endif()
if(CUDA_PROBLEM)
  if(EINSUMMABLE_CUDA STREQUAL "AUTO")
    message(STATUS "The CUDA engine is not built: ${CUDA_PROBLEM}")
    return()
  endif()
  message(FATAL_ERROR "EINSUMMABLE_CUDA is ${EINSUMMABLE_CUDA}, but ${CUDA_PROBLEM}")
endif()

# Code for data-centre GPUs, and PTX from which a driver makes code for later ones.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  set(CUDA_TARGETS 80-real 90)
else()
  set(CUDA_TARGETS 80-real 90-real 100)
endif()

add_library(einsummable_cuda SHARED
  "${ENGINE_DIR}/core/float8.cc"
  "${ENGINE_DIR}/core/program.cc"
  "${ENGINE_DIR}/core/schedule.cc"
  "${ENGINE_DIR}/cuda/c_api.cc"
  "${ENGINE_DIR}/cuda/channel.cc"
  "${ENGINE_DIR}/cuda/device.cc"
  "${ENGINE_DIR}/cuda/engine.cc"
  "${ENGINE_DIR}/cuda/ffi_handler.cc"
  "${ENGINE_DIR}/cuda/ipc.cc"
  "${ENGINE_DIR}/cuda/kernels.cu"
  "${ENGINE_DIR}/cuda/peers.cc"
  "${ENGINE_DIR}/cuda/runtime_api.cc")
target_include_directories(einsummable_cuda PRIVATE "${ENGINE_DIR}")
target_include_directories(einsummable_cuda SYSTEM PRIVATE "${JAXLIB_DIR}/include" ${CUDAToolkit_INCLUDE_DIRS})
# No contraction to fused multiply-adds: results are those of the CPU's engine.
target_compile_options(einsummable_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-fmad=false;--threads=0;SHELL:-Werror all-warnings;SHELL:-Xcompiler -Wall,-Wextra>")
target_link_libraries(einsummable_cuda PRIVATE CUDA::cudart_static Threads::Threads)
set_target_properties(einsummable_cuda PROPERTIES
  CUDA_ARCHITECTURES "${CUDA_TARGETS}"
  CUDA_RUNTIME_LIBRARY Static)
list(APPEND ENGINES einsummable_cuda)
