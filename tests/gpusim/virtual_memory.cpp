#include "virtual_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "devices.h"
#include "settings.h"
#include "unobserved.h"

namespace gpusim {

namespace cuda = hvdlite::cuda;

namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
const char* const kDeviceName = "gpusim-device-";  // and its number, by which other processes know the file

bool is_whole(std::size_t nbytes) { return nbytes != 0 && nbytes % VirtualMemory::kGranularity == 0; }

// A file whose bytes are 0xff; -1: there is no more memory.
int new_file(int physical, std::size_t nbytes) {
  const int fd = memfd_create((kDeviceName + std::to_string(physical)).c_str(), MFD_CLOEXEC);
  if (fd < 0) return -1;
  void* all = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(nbytes)) == 0) {
    all = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (all == MAP_FAILED) return close(fd), -1;
  std::memset(all, 0xff, nbytes);
  munmap(all, nbytes);
  return fd;
}

// The device whose memory the file is; -1: it is another file.
int physical_of(int fd) {
  char target[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  int physical = -1;
  if (readlink(link.c_str(), target, sizeof target - 1) <= 0) return -1;
  return std::sscanf(target, "/memfd:gpusim-device-%d", &physical) == 1 ? physical : -1;
}

}  // namespace

VirtualMemory& virtual_memory() {
  static auto* all = new VirtualMemory;
  return *all;
}

Error VirtualMemory::create(cuda::Allocation* allocation, std::size_t nbytes, const cuda::Placement& placement) {
  if (!settings().virtual_memory) return NOT_SUPPORTED;
  const bool is_exportable = placement.handle_types == cuda::kFileDescriptor;
  if (!is_whole(nbytes) || placement.type != cuda::kPinned || (placement.handle_types != 0 && !is_exportable) ||
      placement.location.type != cuda::kLocationDevice || placement.flags.direct_rdma != 0) {
    return INVALID_VALUE;
  }
  const Context* context = context_of(placement.location.id);
  if (context == nullptr) return INVALID_DEVICE;
  const Locked locked(mutex_);
  const int fd = new_file(context->physical, nbytes);
  if (fd < 0) return OUT_OF_MEMORY;
  files_[*allocation = ++made_] = {fd, nbytes, context->physical, is_exportable};
  return SUCCESS;
}

Error VirtualMemory::release(cuda::Allocation allocation) {
  const Locked locked(mutex_);
  const auto found = files_.find(allocation);
  if (found == files_.end()) return INVALID_VALUE;
  close(found->second.fd);
  files_.erase(found);
  return SUCCESS;
}

Error VirtualMemory::export_file(int* fd, cuda::Allocation allocation) {
  if (!settings().files) return NOT_PERMITTED;
  const Locked locked(mutex_);
  const auto found = files_.find(allocation);
  if (found == files_.end() || !found->second.is_exportable) return INVALID_VALUE;
  *fd = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  return *fd < 0 ? OPERATING_SYSTEM : SUCCESS;
}

Error VirtualMemory::import_file(cuda::Allocation* allocation, int fd) {
  if (!settings().virtual_memory) return NOT_SUPPORTED;
  struct stat status;
  if (auto team = MulticastTeam::opened(fd)) {
    const Locked locked(mutex_);
    files_[*allocation = ++made_] = {fcntl(fd, F_DUPFD_CLOEXEC, 0), team->nbytes(), -1, true, team};
    return SUCCESS;
  }
  const int physical = physical_of(fd);
  if (physical < 0 || fstat(fd, &status) != 0) return INVALID_VALUE;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return OPERATING_SYSTEM;
  const Locked locked(mutex_);
  files_[*allocation = ++made_] = {own, static_cast<std::size_t>(status.st_size), physical, true};
  return SUCCESS;
}

Error VirtualMemory::create_team(cuda::Allocation* allocation, unsigned devices, std::size_t nbytes) {
  if (!is_whole(nbytes)) return INVALID_VALUE;
  auto team = MulticastTeam::create(devices, nbytes);
  if (team == nullptr) return OUT_OF_MEMORY;
  const Locked locked(mutex_);
  files_[*allocation = ++made_] = {fcntl(team->fd(), F_DUPFD_CLOEXEC, 0), nbytes, -1, true, team};
  return SUCCESS;
}

Error VirtualMemory::add_to_team(cuda::Allocation allocation, int physical) {
  const Locked locked(mutex_);
  const auto found = team(allocation);
  return found != nullptr && found->add(physical) ? SUCCESS : INVALID_VALUE;
}

Error VirtualMemory::bind_to_team(cuda::Allocation allocation, cuda::Allocation bound, std::size_t nbytes) {
  const Locked locked(mutex_);
  const auto to = team(allocation);
  const auto found = files_.find(bound);
  if (to == nullptr || !to->is_complete() || found == files_.end()) return INVALID_VALUE;
  const File& file = found->second;
  const bool is_all = nbytes == to->nbytes() && nbytes == file.nbytes;
  if (file.team != nullptr || !file.is_exportable || !is_all) return INVALID_VALUE;
  return to->bind(file.physical, file.fd) ? SUCCESS : INVALID_VALUE;
}

Error VirtualMemory::unbind_from_team(cuda::Allocation allocation, int physical, std::size_t nbytes) {
  const Locked locked(mutex_);
  const auto from = team(allocation);
  return from != nullptr && nbytes == from->nbytes() && from->unbind(physical) ? SUCCESS : INVALID_VALUE;
}

hvdlite::kernels::Bound VirtualMemory::bound_to(Address address) {
  const Locked locked(mutex_);
  const auto after = mapped_.upper_bound(address);
  if (after != mapped_.begin()) {
    const auto& [begin, mapping] = *std::prev(after);
    if (mapping.team != nullptr && mapping.is_allowed && address < begin + mapping.nbytes) {
      return mapping.team->at(address - begin);
    }
  }
  die("multicast: %#zx is no address of a team", static_cast<std::size_t>(address));
}

Error VirtualMemory::reserve(Address* address, std::size_t nbytes) {
  if (!is_whole(nbytes)) return INVALID_VALUE;
  const Locked locked(mutex_);
  // Aligned to the granularity: as much more is reserved, and given back around what is aligned.
  void* all = mmap(nullptr, nbytes + kGranularity, PROT_NONE, kReserved, -1, 0);
  if (all == MAP_FAILED) return OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<Address>(all);
  *address = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (*address > begin) munmap(all, *address - begin);
  if (*address < begin + kGranularity) munmap(pointer<void>(*address + nbytes), begin + kGranularity - *address);
  reserved_[*address] = nbytes;
  return SUCCESS;
}

Error VirtualMemory::unreserve(Address address, std::size_t nbytes) {
  const Locked locked(mutex_);
  const auto found = reserved_.find(address);
  if (found == reserved_.end() || found->second != nbytes || !memory().is_free(address, nbytes)) return INVALID_VALUE;
  munmap(pointer<void>(address), nbytes);
  reserved_.erase(found);
  return SUCCESS;
}

Error VirtualMemory::map(Address address, std::size_t nbytes, cuda::Allocation allocation) {
  const Locked locked(mutex_);
  const auto found = files_.find(allocation);
  if (found == files_.end() || !is_whole(nbytes) || nbytes > found->second.nbytes || address % kGranularity != 0 ||
      !is_reserved(address, nbytes) || !memory().is_free(address, nbytes)) {
    return INVALID_VALUE;
  }
  const File& file = found->second;
  if (file.team != nullptr) {  // plain accesses crash
    if (!file.team->is_complete() || nbytes != file.nbytes) return INVALID_VALUE;
    mapped_[address] = {nbytes, -1, file.team};
    memory().add(address, {Block::Kind::kMapped, nbytes, -1});
    return SUCCESS;
  }
  if (mmap(pointer<void>(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file.fd, 0) == MAP_FAILED) {
    return OUT_OF_MEMORY;
  }
  mapped_[address] = {nbytes, file.physical};
  memory().add(address, {Block::Kind::kMapped, nbytes, ordinal_of(file.physical)});
  return SUCCESS;
}

Error VirtualMemory::unmap(Address address, std::size_t nbytes) {
  const Locked locked(mutex_);
  const auto found = mapped_.find(address);
  if (found == mapped_.end() || found->second.nbytes != nbytes) return INVALID_VALUE;
  memory().remove(address, Block::Kind::kMapped);
  mmap(pointer<void>(address), nbytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  mapped_.erase(found);
  return SUCCESS;
}

Error VirtualMemory::allow(Address address, std::size_t nbytes, const cuda::Access* accesses, std::size_t count) {
  const Locked locked(mutex_);
  const auto mapped = mapped_.find(address);
  if (mapped != mapped_.end() && mapped->second.team != nullptr) {
    mapped->second.is_allowed = nbytes == mapped->second.nbytes && count > 0;
    return mapped->second.is_allowed ? SUCCESS : INVALID_VALUE;
  }
  std::vector<Address> begins;
  Address end = address;
  for (auto at = mapped_.find(address); at != mapped_.end() && at->first == end && end < address + nbytes; ++at) {
    begins.push_back(at->first);
    end += at->second.nbytes;
  }
  if (nbytes == 0 || end != address + nbytes) return INVALID_VALUE;
  std::uint64_t devices = 0;
  for (const auto* access = accesses; access != accesses + count; ++access) {
    if (access->location.type != cuda::kLocationDevice || access->flags != cuda::kReadWrite) return INVALID_VALUE;
    const Context* context = context_of(access->location.id);
    if (context == nullptr) return INVALID_DEVICE;
    for (const Address begin : begins) {
      if (!reaches(context->physical, mapped_.at(begin).physical)) return INVALID_DEVICE;
    }
    devices |= std::uint64_t{1} << access->location.id;
  }
  if (mprotect(pointer<void>(address), nbytes, PROT_READ | PROT_WRITE) != 0) return INVALID_VALUE;
  for (const Address begin : begins) memory().allow(begin, devices);
  return SUCCESS;
}

std::shared_ptr<MulticastTeam> VirtualMemory::team(cuda::Allocation allocation) {
  const auto found = files_.find(allocation);
  return found == files_.end() ? nullptr : found->second.team;
}

bool VirtualMemory::is_reserved(Address address, std::size_t nbytes) const {
  auto after = reserved_.upper_bound(address);
  if (after == reserved_.begin()) return false;
  const auto& [begin, size] = *--after;
  return address + nbytes <= begin + size;
}

}  // namespace gpusim
