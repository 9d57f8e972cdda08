#include "gpu/device_copies.h"

namespace hvdlite {

using cuda::check;
using cuda::driver;

std::unique_ptr<Moment> DeviceCopies::begin(const std::vector<const Moment*>& after, const std::vector<Copy>& copies) {
  stream_.follow(after);
  {
    const cuda::Current current(stream_.context());
    for (const Copy& copy : copies) {
      if (copy.nbytes != 0) check(driver().copy(copy.to, copy.from, copy.nbytes, stream_.handle()), "cuMemcpyAsync");
    }
  }
  return std::make_unique<Moment>(stream_.device(), reinterpret_cast<std::uintptr_t>(stream_.handle()));
}

PinnedMemory::PinnedMemory(int device, std::size_t nbytes) : context_(primary_context(device)), nbytes_(nbytes) {
  const cuda::Current current(context_);
  check(driver().host_alloc(&memory_, nbytes, cuda::kHostAllocPortable), "cuMemHostAlloc");
}

PinnedMemory::~PinnedMemory() {
  if (memory_ == nullptr || !is_ours_) return;
  const cuda::Current current(context_, std::nothrow);
  driver().host_free(memory_);
}

}  // namespace hvdlite
