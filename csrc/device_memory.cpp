#include "device_memory.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#include "device_stream.h"
#include "without_signals.h"

namespace hvdlite {

using cuda::check;
using cuda::driver;

namespace {

bool has(cuda::Device device, int attribute) {
  int value = 0;
  return driver().device_attribute(&value, attribute, device) == cuda::kSuccess && value != 0;
}

}  // namespace

bool DeviceSegment::is_possible(int device) {
  const cuda::Device handle = cuda::device_at(device);
  return has(handle, cuda::kMemoryManagement) && has(handle, cuda::kFileDescriptors);
}

DeviceSegment::DeviceSegment(int device, std::size_t nbytes) : device_(device), mapping_(new Mapping) {
  mapping_->context = primary_context(device);
  const cuda::Current current(mapping_->context);
  cuda::Placement placement{};
  placement.type = cuda::kPinned;
  placement.handle_types = cuda::kFileDescriptor;
  placement.location = {cuda::kLocationDevice, cuda::device_at(device)};
  placement.flags.direct_rdma = has(cuda::device_at(device), cuda::kDirectRdmaSupported);
  std::size_t& unit = mapping_->unit;
  check(driver().memory_granularity(&unit, &placement, cuda::kRecommendedGranularity), "cuMemGetAllocationGranularity");
  mapping_->nbytes = std::max<std::size_t>(1, (nbytes + unit - 1) / unit) * unit;
  check(driver().memory_create(&mapping_->own, mapping_->nbytes, &placement, 0), "cuMemCreate");
}

DeviceSegment::~DeviceSegment() {
  if (mapping_->begin == 0) return;
  // No stream is known here, and a thread that waited for all of them could be the one that others wait for.
  const Mapping* mapping = mapping_.release();
  try {
    const WithoutSignals inherited;
    std::thread([mapping] {
      const cuda::Current current(mapping->context, std::nothrow);
      driver().synchronize_context();
      for (const auto& release : mapping->releases) release();
      delete mapping;
    }).detach();
  } catch (const std::system_error&) {  // no thread: it stays mapped to the end of the process
  }
}

DeviceSegment::Mapping::~Mapping() {
  const cuda::Current current(context, std::nothrow);
  for (std::size_t place = 0; place < is_mapped.size(); ++place) {
    if (is_mapped[place]) driver().unmap(begin + place * nbytes, nbytes);
  }
  if (begin != 0) driver().unreserve(begin, is_mapped.size() * nbytes);
  if (own != 0) driver().memory_release(own);
}

int DeviceSegment::share() const {
  const cuda::Current current(mapping_->context);
  int file = -1;
  check(driver().memory_export(&file, mapping_->own, cuda::kFileDescriptor, 0), "cuMemExportToShareableHandle");
  return file;
}

void DeviceSegment::map(const std::vector<int>& files, std::size_t own) {
  const cuda::Current current(mapping_->context);
  const std::size_t nbytes = mapping_->nbytes;
  check(driver().reserve(&mapping_->begin, files.size() * nbytes, mapping_->unit, 0, 0), "cuMemAddressReserve");
  mapping_->is_mapped.resize(files.size());
  for (std::size_t place = 0; place < files.size(); ++place) {
    if (place == own) {
      map_at(place, mapping_->own);
      continue;
    }
    cuda::Allocation theirs = 0;
    auto* file = reinterpret_cast<void*>(static_cast<std::intptr_t>(files[place]));
    check(driver().memory_import(&theirs, file, cuda::kFileDescriptor), "cuMemImportFromShareableHandle");
    map_at(place, theirs);
    check(driver().memory_release(theirs), "cuMemRelease");  // it stays as long as it is mapped
  }
  const cuda::Access access{{cuda::kLocationDevice, cuda::device_at(device_)}, cuda::kReadWrite};
  for (std::size_t place = 0; place < files.size(); ++place) {
    check(driver().allow(mapping_->begin + place * nbytes, nbytes, &access, 1), "cuMemSetAccess");
  }
}

void DeviceSegment::map_at(std::size_t place, cuda::Allocation allocation) {
  check(driver().map(mapping_->begin + place * mapping_->nbytes, mapping_->nbytes, 0, allocation, 0), "cuMemMap");
  mapping_->is_mapped[place] = true;
}

std::vector<std::uintptr_t> DeviceSegment::copies() const {
  std::vector<std::uintptr_t> all;
  for (std::size_t place = 0; place < mapping_->is_mapped.size(); ++place) {
    all.push_back(mapping_->begin + place * mapping_->nbytes);
  }
  return all;
}

}  // namespace hvdlite
