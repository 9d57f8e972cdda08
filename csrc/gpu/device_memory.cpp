#include "gpu/device_memory.h"

#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#include "waiting/without_signals.h"

namespace hvdlite {
namespace {

constexpr std::chrono::milliseconds kWhileCaptured(10);

// Waits for the device, for which the driver refuses to wait while a stream is being captured.
void settle() {
  cuda::Result result;
  while ((result = cuda::driver().synchronize_context()) == cuda::kStreamInCapture || result == cuda::kCaptureSpoilt) {
    std::this_thread::sleep_for(kWhileCaptured);
  }
}

}  // namespace

DeviceSegment::~DeviceSegment() {
  if (getpid() != holding_->owner) {
    static_cast<void>(holding_.release());
    return;
  }
  if (!holding_->is_in_use) return;
  // No stream is known here, and a thread that waited for all of them could be the one that others wait for.
  const Holding* holding = holding_.release();
  try {
    const WithoutSignals inherited;
    std::thread([holding] {
      const cuda::Current current(holding->context, std::nothrow);
      settle();
      for (const auto& release : holding->releases) release();
      delete holding;
    }).detach();
  } catch (const std::system_error&) {  // no thread: it stays mapped to the end of the process
  }
}

}  // namespace hvdlite
