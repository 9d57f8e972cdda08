#include "exported.h"
#include "settings.h"
#include "virtual_memory.h"

namespace hvdlite::cuda {

using namespace gpusim;

namespace {

bool is_proper(const MulticastTeam& wanted) {
  return wanted.devices > 0 && wanted.devices <= 64 && wanted.handle_types == kFileDescriptor && wanted.flags == 0;
}

}  // namespace

Result cuMulticastGetGranularity(std::size_t* n, const MulticastTeam* wanted, int option) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(settings().multicast, NOT_SUPPORTED);
  GPUSIM_REQUIRE((option & ~kRecommendedGranularity) == 0 && is_proper(*wanted), INVALID_VALUE);
  return *n = VirtualMemory::kGranularity, SUCCESS;
}

Result cuMulticastCreate(Allocation* team, const MulticastTeam* wanted) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(settings().multicast, NOT_SUPPORTED);
  GPUSIM_REQUIRE(is_proper(*wanted), INVALID_VALUE);
  return virtual_memory().create_team(team, wanted->devices, wanted->nbytes);
}

Result cuMulticastAddDevice(Allocation team, Device device) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(device) != nullptr, INVALID_DEVICE);
  return virtual_memory().add_to_team(team, context_of(device)->physical);
}

Result cuMulticastBindMem(Allocation team, std::size_t at, Allocation memory, std::size_t offset, std::size_t n,
                          unsigned long long flags) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(at == 0 && offset == 0 && flags == 0, INVALID_VALUE);
  return virtual_memory().bind_to_team(team, memory, n);
}

Result cuMulticastUnbind(Allocation team, Device device, std::size_t at, std::size_t n) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(device) != nullptr, INVALID_DEVICE);
  GPUSIM_REQUIRE(at == 0, INVALID_VALUE);
  return virtual_memory().unbind_from_team(team, context_of(device)->physical, n);
}

}  // namespace hvdlite::cuda

namespace hvdlite::kernels {

Bound bound_to(Address multicast) { return gpusim::virtual_memory().bound_to(multicast); }

}  // namespace hvdlite::kernels
