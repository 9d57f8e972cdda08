#include <cstdint>

#include "exported.h"
#include "virtual_memory.h"

namespace hvdlite::cuda {

using namespace gpusim;

Result cuMemGetAllocationGranularity(std::size_t* n, const Placement* placement, int option) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE((option & ~kRecommendedGranularity) == 0 && placement->type == kPinned, INVALID_VALUE);
  return *n = VirtualMemory::kGranularity, SUCCESS;
}

Result cuMemCreate(Allocation* allocation, std::size_t n, const Placement* placement, unsigned long long flags) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(flags == 0, INVALID_VALUE);
  return virtual_memory().create(allocation, n, *placement);
}

Result cuMemRelease(Allocation allocation) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return virtual_memory().release(allocation);
}

Result cuMemExportToShareableHandle(void* fd, Allocation allocation, int kind, unsigned long long flags) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(kind == kFileDescriptor && flags == 0, INVALID_VALUE);
  return virtual_memory().export_file(static_cast<int*>(fd), allocation);
}

Result cuMemImportFromShareableHandle(Allocation* allocation, void* fd, int kind) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(kind == kFileDescriptor, INVALID_VALUE);
  return virtual_memory().import_file(allocation, static_cast<int>(reinterpret_cast<std::intptr_t>(fd)));
}

Result cuMemAddressReserve(Address* address, std::size_t n, std::size_t alignment, Address, unsigned long long flags) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(flags == 0 && VirtualMemory::kGranularity % (alignment == 0 ? 1 : alignment) == 0, INVALID_VALUE);
  return virtual_memory().reserve(address, n);
}

Result cuMemAddressFree(Address address, std::size_t n) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return virtual_memory().unreserve(address, n);
}

Result cuMemMap(Address address, std::size_t n, std::size_t offset, Allocation allocation, unsigned long long flags) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(offset == 0 && flags == 0, INVALID_VALUE);
  return virtual_memory().map(address, n, allocation);
}

Result cuMemUnmap(Address address, std::size_t n) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return virtual_memory().unmap(address, n);
}

Result cuMemSetAccess(Address address, std::size_t n, const Access* accesses, std::size_t count) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return virtual_memory().allow(address, n, accesses, count);
}

}  // namespace hvdlite::cuda
