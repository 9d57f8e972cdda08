// Compiles if csrc/gpu/cuda_driver.h says of functions, structures and constants what the driver's own header says.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "gpu/cuda_driver.h"

namespace {

using namespace hvdlite::cuda;

// Passed in the same way, whatever the names. Of pointers it matters whether they point to pointers, and how much is
// there; structures that are only declared point nowhere.
template <class A, class B>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using To = std::remove_cv_t<std::remove_pointer_t<A>>;
    using ToOther = std::remove_cv_t<std::remove_pointer_t<B>>;
    if constexpr (std::is_pointer_v<To> || std::is_pointer_v<ToOther>) {
      return alike<To, ToOther>();
    } else if constexpr (std::is_void_v<To> || std::is_void_v<ToOther>) {
      return std::is_void_v<To> == std::is_void_v<ToOther>;
    } else if constexpr (std::is_class_v<To> && std::is_class_v<ToOther>) {
      return true;  // compared below
    } else {
      return alike<To, ToOther>();
    }
  } else {
    return std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B> &&
           sizeof(A) == sizeof(B);
  }
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class OurResult, class... Ours, class TheirResult, class... Theirs>
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool same_count = sizeof...(Ours) == sizeof...(Theirs);
  static constexpr bool all() {
    if constexpr (same_count) {
      return alike<OurResult, TheirResult>() && (alike<Ours, Theirs>() && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = all();
};

#define HVDLITE_CHECK(name, symbol, parameters) \
  static_assert(SameCall<decltype(Driver::name), decltype(&symbol)>::value, #symbol);
HVDLITE_CUDA_FUNCTIONS(HVDLITE_CHECK)
#if CUDA_VERSION >= 12010
HVDLITE_MULTICAST_FUNCTIONS(HVDLITE_CHECK)

static_assert(sizeof(MulticastTeam) == sizeof(CUmulticastObjectProp) &&
              offsetof(MulticastTeam, nbytes) == offsetof(CUmulticastObjectProp, size) &&
              offsetof(MulticastTeam, handle_types) == offsetof(CUmulticastObjectProp, handleTypes) &&
              offsetof(MulticastTeam, flags) == offsetof(CUmulticastObjectProp, flags));
static_assert(kMinimumGranularity == CU_MULTICAST_GRANULARITY_MINIMUM &&
              kMulticastSupported == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
#endif

static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(Location) == sizeof(CUmemLocation) && offsetof(Location, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(Access) == sizeof(CUmemAccessDesc) && offsetof(Access, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle) && kLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(sizeof(Placement) == sizeof(CUmemAllocationProp) &&
              offsetof(Placement, handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes) &&
              offsetof(Placement, location) == offsetof(CUmemAllocationProp, location) &&
              offsetof(Placement, flags) == offsetof(CUmemAllocationProp, allocFlags) &&
              offsetof(Placement, flags.direct_rdma) == offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));

static_assert(kSuccess == CUDA_SUCCESS && kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventBlockingSync == CU_EVENT_BLOCKING_SYNC && kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE && kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE &&
              kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kWaitGeq == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE && kPinned == CU_MEM_ALLOCATION_TYPE_PINNED &&
              kFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
              kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
              kRecommendedGranularity == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(kDirectRdmaSupported == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED &&
              kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT &&
              kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR &&
              kComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE &&
              kStreamInCapture == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
              kCaptureSpoilt == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED &&
              kRelaxedCaptures == CU_STREAM_CAPTURE_MODE_RELAXED);

}  // namespace
