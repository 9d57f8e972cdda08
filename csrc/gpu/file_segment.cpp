#include "gpu/file_segment.h"

#include <algorithm>
#include <new>

#include "gpu/device_stream.h"

namespace hvdlite {

using cuda::check;
using cuda::driver;

namespace {

bool has(cuda::Device device, int attribute) {
  int value = 0;
  return driver().device_attribute(&value, attribute, device) == cuda::kSuccess && value != 0;
}

}  // namespace

struct FileSegment::Mapping : DeviceSegment::Holding {
  ~Mapping() override {
    const cuda::Current current(context, std::nothrow);
    for (std::size_t place = 0; place < is_mapped.size(); ++place) {
      if (is_mapped[place]) driver().unmap(begin + place * nbytes, nbytes);
    }
    if (begin != 0) driver().unreserve(begin, is_mapped.size() * nbytes);
    if (own != 0) driver().memory_release(own);
  }

  std::size_t unit = 0;  // the size of a copy is a multiple of it, and NCCL wants its address to be one
  cuda::Allocation own = 0;
  cuda::Address begin = 0;
  std::vector<bool> is_mapped;  // of every copy for which there are addresses
};

FileSegment::FileSegment(int device, std::size_t nbytes) : FileSegment(device, nbytes, std::make_unique<Mapping>()) {}

FileSegment::FileSegment(int device, std::size_t nbytes, std::unique_ptr<Mapping> mapping)
    : DeviceSegment(std::move(mapping)), device_(device), mapping_(holding<Mapping>()) {
  mapping_.context = primary_context(device);
  const cuda::Current current(mapping_.context);
  cuda::Placement placement{};
  placement.type = cuda::kPinned;
  placement.handle_types = cuda::kFileDescriptor;
  placement.location = {cuda::kLocationDevice, cuda::device_at(device)};
  placement.flags.direct_rdma = has(cuda::device_at(device), cuda::kDirectRdmaSupported);
  std::size_t& unit = mapping_.unit;
  check(driver().memory_granularity(&unit, &placement, cuda::kRecommendedGranularity), "cuMemGetAllocationGranularity");
  mapping_.nbytes = std::max<std::size_t>(1, (nbytes + unit - 1) / unit) * unit;
  check(driver().memory_create(&mapping_.own, mapping_.nbytes, &placement, 0), "cuMemCreate");
}

cuda::Allocation FileSegment::allocation() const { return mapping_.own; }

std::pair<std::string, int> FileSegment::share() {
  const cuda::Current current(mapping_.context);
  int file = -1;
  check(driver().memory_export(&file, mapping_.own, cuda::kFileDescriptor, 0), "cuMemExportToShareableHandle");
  return {"", file};
}

void FileSegment::map(const std::vector<std::string>&, const std::vector<int>& files, std::size_t own) {
  const cuda::Current current(mapping_.context);
  const std::size_t nbytes = mapping_.nbytes;
  check(driver().reserve(&mapping_.begin, files.size() * nbytes, mapping_.unit, 0, 0), "cuMemAddressReserve");
  mapping_.is_in_use = true;
  mapping_.is_mapped.resize(files.size());
  for (std::size_t place = 0; place < files.size(); ++place) {
    if (place == own) {
      map_at(place, mapping_.own);
      continue;
    }
    cuda::Allocation theirs = 0;
    auto* file = reinterpret_cast<void*>(static_cast<std::intptr_t>(files[place]));
    check(driver().memory_import(&theirs, file, cuda::kFileDescriptor), "cuMemImportFromShareableHandle");
    map_at(place, theirs);
    check(driver().memory_release(theirs), "cuMemRelease");  // it stays as long as it is mapped
  }
  const cuda::Access access{{cuda::kLocationDevice, cuda::device_at(device_)}, cuda::kReadWrite};
  for (const std::uintptr_t copy : mapping_.copies) check(driver().allow(copy, nbytes, &access, 1), "cuMemSetAccess");
}

void FileSegment::map_at(std::size_t place, cuda::Allocation allocation) {
  const cuda::Address address = mapping_.begin + place * mapping_.nbytes;
  check(driver().map(address, mapping_.nbytes, 0, allocation, 0), "cuMemMap");
  mapping_.is_mapped[place] = true;
  mapping_.copies.push_back(address);
}

}  // namespace hvdlite
