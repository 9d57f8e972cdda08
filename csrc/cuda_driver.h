// The CUDA driver as far as hvdlite calls it, loaded at run time: what was built without CUDA runs with it.
//
// The only place that knows the vendor's names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hvdlite::cuda {

using Result = int;
using Device = int;
using Context = struct OpaqueContext*;
using Stream = struct OpaqueStream*;
using Event = struct OpaqueEvent*;
using Address = std::uint64_t;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;  // no implicit order with the legacy default stream
constexpr unsigned kEventBlockingSync = 1, kEventDisableTiming = 2;
constexpr unsigned kHostAllocPortable = 1;
constexpr int kNotCapturing = 0;

// name in the table, exported symbol, parameters
#define HVDLITE_CUDA_FUNCTIONS(F)                                             \
  F(init, cuInit, (unsigned flags))                                           \
  F(error_name, cuGetErrorName, (Result error, const char** name))            \
  F(error_text, cuGetErrorString, (Result error, const char** text))          \
  F(device_count, cuDeviceGetCount, (int* count))                             \
  F(device_get, cuDeviceGet, (Device * device, int ordinal))                  \
  F(retain_context, cuDevicePrimaryCtxRetain, (Context * context, Device))    \
  F(push_context, cuCtxPushCurrent_v2, (Context))                             \
  F(pop_context, cuCtxPopCurrent_v2, (Context * context))                     \
  F(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))         \
  F(stream_destroy, cuStreamDestroy_v2, (Stream))                             \
  F(stream_wait_event, cuStreamWaitEvent, (Stream, Event, unsigned flags))    \
  F(stream_is_capturing, cuStreamIsCapturing, (Stream, int* status))          \
  F(event_create, cuEventCreate, (Event * event, unsigned flags))             \
  F(event_destroy, cuEventDestroy_v2, (Event))                                \
  F(event_record, cuEventRecord, (Event, Stream))                             \
  F(event_synchronize, cuEventSynchronize, (Event))                           \
  F(copy, cuMemcpyAsync, (Address to, Address from, std::size_t n, Stream))   \
  F(host_alloc, cuMemHostAlloc, (void** memory, std::size_t n, unsigned flags)) \
  F(host_free, cuMemFreeHost, (void* memory))

struct Driver {
#define HVDLITE_DECLARE(name, symbol, parameters) Result(*name) parameters;
  HVDLITE_CUDA_FUNCTIONS(HVDLITE_DECLARE)
#undef HVDLITE_DECLARE
};

// The driver of this machine, or the library that was named by `use_library`. Throws std::runtime_error with the reason
// where there is none, or no device.
const Driver& driver();

// To be called before the first call of `driver`; empty: libcuda.so.1.
void use_library(const std::string& path);

// Throws std::runtime_error that names `what` and the error.
void check(Result result, const char* what);

// The context of a device is current on this thread as long as this lives, whoever's was before.
class Current {
 public:
  explicit Current(Context context) { check(driver().push_context(context), "cuCtxPushCurrent"); }
  ~Current() {
    Context before;
    driver().pop_context(&before);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace hvdlite::cuda
