#include "gpu/multicast.h"

#include <new>
#include <stdexcept>
#include <string>

#include "gpu/device_stream.h"
#include "gpu/multicast_kernels.h"

namespace hvdlite {

using cuda::check;
using cuda::driver;

// What has to be given back, in this order.
struct Multicast::Team {
  ~Team() {
    const cuda::Current current(context, std::nothrow);
    if (is_mapped) driver().unmap(address, nbytes);
    if (address != 0) driver().unreserve(address, nbytes);
    if (is_bound) driver().multicast_unbind(handle, device, 0, nbytes);
    if (handle != 0) driver().memory_release(handle);
  }

  cuda::Context context;
  cuda::Device device;
  std::size_t nbytes;
  std::size_t unit = 0;
  cuda::Allocation handle = 0;
  cuda::Address address = 0;
  bool is_bound = false, is_mapped = false;
};

Multicast::Multicast(FileSegment& segment, unsigned ranks)
    : segment_(segment), ranks_(ranks), team_(std::make_shared<Team>()) {
  team_->context = primary_context(segment.device());
  team_->device = cuda::device_at(segment.device());
  team_->nbytes = segment.copy_bytes();
  int is_supported = 0;
  if (driver().multicast_create == nullptr) throw std::runtime_error("the CUDA driver is too old for multicast");
  const cuda::Result asked = driver().device_attribute(&is_supported, cuda::kMulticastSupported, team_->device);
  if (asked != cuda::kSuccess || is_supported == 0) throw std::runtime_error("the GPU has no multicast");
  MulticastKernels::of(segment.device());  // throws now, while no rank counts on them
  const cuda::MulticastTeam wanted{ranks_, team_->nbytes, cuda::kFileDescriptor, 0};
  check(driver().multicast_granularity(&team_->unit, &wanted, cuda::kMinimumGranularity), "cuMulticastGetGranularity");
  if (team_->nbytes % team_->unit != 0) {
    throw std::runtime_error("multicast takes multiples of " + std::to_string(team_->unit) + " bytes, not " +
                             std::to_string(team_->nbytes));
  }
}

Multicast::~Multicast() = default;

int Multicast::create() {
  const cuda::Current current(team_->context);
  const cuda::MulticastTeam wanted{ranks_, team_->nbytes, cuda::kFileDescriptor, 0};
  check(driver().multicast_create(&team_->handle, &wanted), "cuMulticastCreate");
  int file = -1;
  check(driver().memory_export(&file, team_->handle, cuda::kFileDescriptor, 0), "cuMemExportToShareableHandle");
  return file;
}

void Multicast::open(int file) {
  const cuda::Current current(team_->context);
  auto* shared = reinterpret_cast<void*>(static_cast<std::intptr_t>(file));
  check(driver().memory_import(&team_->handle, shared, cuda::kFileDescriptor), "cuMemImportFromShareableHandle");
}

void Multicast::join() {
  const cuda::Current current(team_->context);
  check(driver().multicast_add(team_->handle, team_->device), "cuMulticastAddDevice");
}

void Multicast::bind() {
  const cuda::Current current(team_->context);
  check(driver().multicast_bind(team_->handle, 0, segment_.allocation(), 0, team_->nbytes, 0), "cuMulticastBindMem");
  team_->is_bound = true;
}

void Multicast::map() {
  const cuda::Current current(team_->context);
  check(driver().reserve(&team_->address, team_->nbytes, team_->unit, 0, 0), "cuMemAddressReserve");
  check(driver().map(team_->address, team_->nbytes, 0, team_->handle, 0), "cuMemMap");
  team_->is_mapped = true;
  const cuda::Access access{{cuda::kLocationDevice, team_->device}, cuda::kReadWrite};
  check(driver().allow(team_->address, team_->nbytes, &access, 1), "cuMemSetAccess");
  segment_.before_unmapping([team = team_]() mutable { team.reset(); });
}

std::uintptr_t Multicast::address() const { return team_->address; }

}  // namespace hvdlite
