// The CUDA driver as far as hvdlite calls it, loaded at run time: what was built without CUDA runs with it.
//
// The only place that knows the vendor's names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

namespace hvdlite::cuda {

using Result = int;
using Device = int;
using Context = struct OpaqueContext*;
using Stream = struct OpaqueStream*;
using Event = struct OpaqueEvent*;
using Module = struct OpaqueModule*;
using Function = struct OpaqueFunction*;
using Address = std::uint64_t;
using Allocation = unsigned long long;  // physical memory, which is nowhere before it is mapped

struct Uuid {
  unsigned char bytes[16];
};

struct Location {
  int type;  // kLocationDevice
  int id;
};

struct IpcHandle {
  char bytes[64];
};

// CUmemAllocationProp: where physical memory is made, and what it may be exported as.
struct Placement {
  int type;          // kPinned
  int handle_types;  // kFileDescriptor
  Location location;
  void* windows_metadata;
  struct {
    unsigned char compression, direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(Placement) == 32, "as CUmemAllocationProp");

// CUmulticastObjectProp: GPUs whose memory gets one address beside its own ones.
struct MulticastTeam {
  unsigned devices;
  std::size_t nbytes;  // of each
  unsigned long long handle_types;
  unsigned long long flags;
};

struct Access {
  Location location;
  int flags;  // kReadWrite
};

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;  // no implicit order with the legacy default stream
constexpr unsigned kEventBlockingSync = 1, kEventDisableTiming = 2;
constexpr unsigned kHostAllocPortable = 1, kHostRegisterPortable = 1, kHostRegisterDeviceMap = 2;
constexpr unsigned kWaitGeq = 0;  // until int32(value there - value) >= 0
constexpr int kLocationDevice = 1, kPinned = 1, kFileDescriptor = 1, kReadWrite = 3, kRecommendedGranularity = 1;
constexpr unsigned kLazyPeerAccess = 1;
constexpr int kMinimumGranularity = 0;
constexpr int kDirectRdmaSupported = 110, kMultiprocessorCount = 16, kMulticastSupported = 132;
constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;
constexpr int kNotCapturing = 0, kStreamInCapture = 900, kCaptureSpoilt = 901, kRelaxedCaptures = 2;

// name in the table, exported symbol, parameters
#define HVDLITE_CUDA_FUNCTIONS(F)                                                                               \
  F(init, cuInit, (unsigned flags))                                                                             \
  F(version, cuDriverGetVersion, (int* version))                                                                \
  F(error_name, cuGetErrorName, (Result error, const char** name))                                              \
  F(error_text, cuGetErrorString, (Result error, const char** text))                                            \
  F(device_count, cuDeviceGetCount, (int* count))                                                               \
  F(device_get, cuDeviceGet, (Device * device, int ordinal))                                                    \
  F(device_name, cuDeviceGetName, (char* name, int length, Device))                                             \
  F(device_uuid, cuDeviceGetUuid_v2, (Uuid * uuid, Device))                                                     \
  F(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, Device))                                \
  F(retain_context, cuDevicePrimaryCtxRetain, (Context * context, Device))                                      \
  F(push_context, cuCtxPushCurrent_v2, (Context))                                                               \
  F(pop_context, cuCtxPopCurrent_v2, (Context * context))                                                       \
  F(synchronize_context, cuCtxSynchronize, ())                                                                  \
  F(stream_create, cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))                 \
  F(stream_destroy, cuStreamDestroy_v2, (Stream))                                                               \
  F(stream_wait_event, cuStreamWaitEvent, (Stream, Event, unsigned flags))                                      \
  F(stream_write_value, cuStreamWriteValue32_v2, (Stream, Address, std::uint32_t value, unsigned flags))        \
  F(stream_wait_value, cuStreamWaitValue32_v2, (Stream, Address, std::uint32_t value, unsigned flags))          \
  F(stream_is_capturing, cuStreamIsCapturing, (Stream, int* status))                                            \
  F(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                                      \
  F(event_create, cuEventCreate, (Event * event, unsigned flags))                                               \
  F(event_destroy, cuEventDestroy_v2, (Event))                                                                  \
  F(event_record, cuEventRecord, (Event, Stream))                                                               \
  F(event_query, cuEventQuery, (Event))                                                                         \
  F(event_synchronize, cuEventSynchronize, (Event))                                                             \
  F(event_elapsed, cuEventElapsedTime, (float* milliseconds, Event from, Event to))                             \
  F(copy, cuMemcpyAsync, (Address to, Address from, std::size_t n, Stream))                                     \
  F(set, cuMemsetD8Async, (Address to, unsigned char value, std::size_t n, Stream))                             \
  F(host_alloc, cuMemHostAlloc, (void** memory, std::size_t n, unsigned flags))                                 \
  F(host_free, cuMemFreeHost, (void* memory))                                                                   \
  F(host_register, cuMemHostRegister_v2, (void* memory, std::size_t n, unsigned flags))                         \
  F(host_unregister, cuMemHostUnregister, (void* memory))                                                       \
  F(host_address, cuMemHostGetDevicePointer_v2, (Address * address, void* memory, unsigned flags))              \
  F(memory_alloc, cuMemAlloc_v2, (Address * address, std::size_t n))                                            \
  F(memory_free, cuMemFree_v2, (Address))                                                                       \
  F(ipc_export, cuIpcGetMemHandle, (IpcHandle * handle, Address))                                               \
  F(ipc_open, cuIpcOpenMemHandle_v2, (Address * address, IpcHandle, unsigned flags))                            \
  F(ipc_close, cuIpcCloseMemHandle, (Address))                                                                  \
  F(memory_granularity, cuMemGetAllocationGranularity, (std::size_t* n, const Placement*, int option))          \
  F(memory_create, cuMemCreate, (Allocation * allocation, std::size_t n, const Placement*, unsigned long long)) \
  F(memory_release, cuMemRelease, (Allocation))                                                                 \
  F(memory_export, cuMemExportToShareableHandle, (void* fd, Allocation, int kind, unsigned long long))          \
  F(memory_import, cuMemImportFromShareableHandle, (Allocation * allocation, void* fd, int kind))               \
  F(reserve, cuMemAddressReserve,                                                                               \
    (Address * address, std::size_t n, std::size_t alignment, Address, unsigned long long))                     \
  F(unreserve, cuMemAddressFree, (Address, std::size_t n))                                                      \
  F(map, cuMemMap, (Address, std::size_t n, std::size_t offset, Allocation, unsigned long long))                \
  F(unmap, cuMemUnmap, (Address, std::size_t n))                                                                \
  F(allow, cuMemSetAccess, (Address, std::size_t n, const Access*, std::size_t count))                          \
  F(module_load, cuModuleLoadData, (Module * module, const void* image))                                        \
  F(module_function, cuModuleGetFunction, (Function * function, Module, const char* name))                      \
  F(launch, cuLaunchKernel,                                                                                     \
    (Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,           \
     unsigned block_z, unsigned shared, Stream, void** parameters, void** extra))

// Since CUDA 12.1.
#define HVDLITE_MULTICAST_FUNCTIONS(F)                                                                          \
  F(multicast_create, cuMulticastCreate, (Allocation * team, const MulticastTeam*))                             \
  F(multicast_add, cuMulticastAddDevice, (Allocation team, Device))                                             \
  F(multicast_bind, cuMulticastBindMem,                                                                         \
    (Allocation team, std::size_t at, Allocation, std::size_t offset, std::size_t n, unsigned long long flags)) \
  F(multicast_unbind, cuMulticastUnbind, (Allocation team, Device, std::size_t at, std::size_t n))              \
  F(multicast_granularity, cuMulticastGetGranularity, (std::size_t* n, const MulticastTeam*, int option))

struct Driver {
#define HVDLITE_DECLARE(name, symbol, parameters) Result(*name) parameters;
  HVDLITE_CUDA_FUNCTIONS(HVDLITE_DECLARE)
  HVDLITE_MULTICAST_FUNCTIONS(HVDLITE_DECLARE)  // null in an older driver
#undef HVDLITE_DECLARE
};

// The driver of this machine, or the library that was named by `use_library`. Throws std::runtime_error with the reason
// where there is none, or no device.
const Driver& driver();

// To be called before the first call of `driver`; empty: libcuda.so.1.
void use_library(const std::string& path);

// Throws std::runtime_error that names `what` and the error.
void check(Result result, const char* what);

// What the driver calls the device that has this number in this process.
inline Device device_at(int ordinal) {
  Device device;
  check(driver().device_get(&device, ordinal), "cuDeviceGet");
  return device;
}

// The context of a device is current on this thread as long as this lives, whoever's was before.
//
// And the driver takes calls with which a thread of the program that captures a graph has nothing to do: it would
// refuse such as query events or allocate, and end the capture.
class Current {
 public:
  explicit Current(Context context) {
    check(driver().push_context(context), "cuCtxPushCurrent");
    exchange_mode();
  }
  // For destructors. At the end of the process the driver may refuse, and there is nothing to free any more.
  Current(Context context, std::nothrow_t) noexcept : is_pushed_(driver().push_context(context) == kSuccess) {
    if (is_pushed_) exchange_mode();
  }
  ~Current() {
    if (!is_pushed_) return;
    exchange_mode();
    Context before;
    driver().pop_context(&before);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  void exchange_mode() noexcept { driver().exchange_capture_mode(&capture_mode_); }

  bool is_pushed_ = true;
  int capture_mode_ = kRelaxedCaptures;  // the one that this thread does not have
};

}  // namespace hvdlite::cuda
