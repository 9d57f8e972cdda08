// The functions of libcuda.so.1 that the simulator has: hvdlite's table, whose parameters the compiler compares, and
// what tests call besides. An idea has a file of them.
#pragma once

#include "captures.h"
#include "devices.h"
#include "gpu/cuda_driver.h"
#include "results.h"

#define GPUSIM_FUNCTIONS_FOR_TESTS(F)                                                   \
  F(current_context, cuCtxGetCurrent, (Context * context))                              \
  F(stream_synchronize, cuStreamSynchronize, (Stream))                                  \
  F(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))              \
  F(begin_capture, cuStreamBeginCapture_v2, (Stream, int mode))                         \
  F(end_capture, cuStreamEndCapture, (Stream, void** graph))                            \
  F(host_function, cuLaunchHostFunc, (Stream, void (*function)(void*), void* argument)) \
  F(pointer_attribute, cuPointerGetAttribute, (void* value, int attribute, Address))

namespace hvdlite::cuda {
extern "C" {
#define GPUSIM_DECLARE(name, symbol, parameters) Result symbol parameters;
HVDLITE_CUDA_FUNCTIONS(GPUSIM_DECLARE)
HVDLITE_MULTICAST_FUNCTIONS(GPUSIM_DECLARE)
GPUSIM_FUNCTIONS_FOR_TESTS(GPUSIM_DECLARE)
#undef GPUSIM_DECLARE
}
}  // namespace hvdlite::cuda

// Returns from a function that may not be called now; the last one from those that could disturb a capture.
#define GPUSIM_NEEDS_CONTEXT \
  if (const gpusim::Error refused = gpusim::refusal()) return refused
#define GPUSIM_NEEDS_NO_CONTEXT \
  if (const gpusim::Error refused = gpusim::refusal_of_any_call()) return refused
#define GPUSIM_NEEDS_NO_CAPTURE \
  if (const gpusim::Error refused = gpusim::refusal_by_captures()) return refused
#define GPUSIM_REQUIRE(condition, error) \
  if (!(condition)) return error
