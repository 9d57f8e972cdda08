#include "device_copies.h"

#include <map>
#include <mutex>
#include <stdexcept>

namespace hvdlite {

using cuda::check;
using cuda::driver;

namespace {

// The context that torch uses as well. Retained once per device and never released: at the end of the process the driver
// may be gone before us.
cuda::Context context_of(int device) {
  static std::mutex mutex;
  static std::map<int, cuda::Context> retained;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& context = retained[device];
  if (context == nullptr) {
    cuda::Device handle;
    check(driver().device_get(&handle, device), "cuDeviceGet");
    check(driver().retain_context(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

Moment::Moment(int device, std::uintptr_t stream) : context_(context_of(device)) {
  const cuda::Current current(context_);
  const auto handle = reinterpret_cast<cuda::Stream>(stream);
  int status = cuda::kNotCapturing;
  check(driver().stream_is_capturing(handle, &status), "cuStreamIsCapturing");
  if (status != cuda::kNotCapturing) {
    throw std::runtime_error(
        "hvdlite's operations cannot be captured into a CUDA graph; call them outside of torch.cuda.graph");
  }
  check(driver().event_create(&event_, cuda::kEventDisableTiming), "cuEventCreate");
  check(driver().event_record(event_, handle), "cuEventRecord");
}

Moment::~Moment() {
  if (event_ != nullptr) driver().event_destroy(event_);  // what waits for it goes on all the same
}

DeviceCopies::DeviceCopies(int device) : context_(context_of(device)) {
  const cuda::Current current(context_);
  check(driver().stream_create(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
  check(driver().event_create(&done_, cuda::kEventDisableTiming | cuda::kEventBlockingSync), "cuEventCreate");
}

DeviceCopies::~DeviceCopies() {
  if (done_ != nullptr) driver().event_destroy(done_);
  if (stream_ != nullptr) driver().stream_destroy(stream_);
}

void DeviceCopies::run(const std::vector<const Moment*>& after, const std::vector<Copy>& copies) {
  const cuda::Current current(context_);
  for (const Moment* moment : after) check(driver().stream_wait_event(stream_, moment->event(), 0), "cuStreamWaitEvent");
  for (const Copy& copy : copies) {
    if (copy.nbytes != 0) check(driver().copy(copy.to, copy.from, copy.nbytes, stream_), "cuMemcpyAsync");
  }
  check(driver().event_record(done_, stream_), "cuEventRecord");
  check(driver().event_synchronize(done_), "cuEventSynchronize");
}

PinnedMemory::PinnedMemory(int device, std::size_t nbytes) : context_(context_of(device)), nbytes_(nbytes) {
  const cuda::Current current(context_);
  check(driver().host_alloc(&memory_, nbytes, cuda::kHostAllocPortable), "cuMemHostAlloc");
}

PinnedMemory::~PinnedMemory() {
  if (memory_ != nullptr) driver().host_free(memory_);
}

}  // namespace hvdlite
