#include "gpu/device_stream.h"

#include <map>
#include <mutex>
#include <stdexcept>

namespace hvdlite {

using cuda::check;
using cuda::driver;

namespace {

// The most urgent that there is, which the driver clamps to what it has: what other ranks wait for goes before the
// matmuls of this one.
constexpr int kPriority = -10;

void refuse_captured(cuda::Stream stream) {
  int status = cuda::kNotCapturing;
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  if (status != cuda::kNotCapturing) {
    throw std::runtime_error(
        "hvdlite's operations cannot be captured into a CUDA graph; call them outside of torch.cuda.graph");
  }
}

}  // namespace

cuda::Context primary_context(int device) {
  static std::mutex mutex;
  static std::map<int, cuda::Context> retained;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& context = retained[device];
  if (context == nullptr) {
    check(driver().retain_context(&context, cuda::device_at(device)), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

Moment::Moment(int device, std::uintptr_t stream, bool is_timed) : context_(primary_context(device)) {
  const cuda::Current current(context_);
  const auto handle = reinterpret_cast<cuda::Stream>(stream);
  refuse_captured(handle);
  const unsigned timing = is_timed ? 0 : cuda::kEventDisableTiming;
  check(driver().event_create(&event_, timing | cuda::kEventBlockingSync), "cuEventCreate");
  check(driver().event_record(event_, handle), "cuEventRecord");
}

Moment::~Moment() {
  const cuda::Current current(context_, std::nothrow);
  if (event_ != nullptr) driver().event_destroy(event_);  // what waits for it goes on all the same
}

void Moment::precede(std::uintptr_t stream) const {
  const cuda::Current current(context_);
  const auto handle = reinterpret_cast<cuda::Stream>(stream);
  refuse_captured(handle);
  check(driver().stream_wait_event(handle, event_, 0), "cuStreamWaitEvent");
}

bool Moment::is_reached() const {
  const cuda::Current current(context_);
  const cuda::Result result = driver().event_query(event_);
  if (result == cuda::kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

void Moment::wait() const {
  const cuda::Current current(context_);
  check(driver().event_synchronize(event_), "cuEventSynchronize");
}

double Moment::seconds_since(const Moment& earlier) const {
  const cuda::Current current(context_);
  float milliseconds = 0;
  check(driver().event_elapsed(&milliseconds, earlier.event_, event_), "cuEventElapsedTime");
  return 1e-3 * milliseconds;
}

DeviceStream::DeviceStream(int device) : device_(device), context_(primary_context(device)) {
  const cuda::Current current(context_);
  check(driver().stream_create(&stream_, cuda::kStreamNonBlocking, kPriority), "cuStreamCreateWithPriority");
}

DeviceStream::DeviceStream(int device, std::uintptr_t stream)
    : device_(device),
      context_(primary_context(device)),
      stream_(reinterpret_cast<cuda::Stream>(stream)),
      is_ours_(false) {}

DeviceStream::~DeviceStream() {
  const cuda::Current current(context_, std::nothrow);
  if (is_ours_ && stream_ != nullptr) driver().stream_destroy(stream_);  // what was enqueued is still done
}

void DeviceStream::follow(const std::vector<const Moment*>& moments) const {
  const cuda::Current current(context_);
  for (const Moment* moment : moments) {
    check(driver().stream_wait_event(stream_, moment->event(), 0), "cuStreamWaitEvent");
  }
}

}  // namespace hvdlite
