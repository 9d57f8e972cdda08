// Physical memory that is a file in memory, addresses to map it at, and what may be passed on to other processes.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "gpu/cuda_driver.h"
#include "memory.h"
#include "multicast_team.h"
#include "results.h"

namespace gpusim {

class VirtualMemory {
 public:
  static constexpr std::size_t kGranularity = std::size_t{2} << 20;

  Error create(hvdlite::cuda::Allocation* allocation, std::size_t nbytes, const hvdlite::cuda::Placement& placement);
  // What is mapped of it stays.
  Error release(hvdlite::cuda::Allocation allocation);
  Error export_file(int* fd, hvdlite::cuda::Allocation allocation);
  Error import_file(hvdlite::cuda::Allocation* allocation, int fd);

  // Teams have handles as memory has, and are exported, imported, mapped and released like it. What the driver blocks
  // for until all devices are in is refused here.
  Error create_team(hvdlite::cuda::Allocation* team, unsigned devices, std::size_t nbytes);
  Error add_to_team(hvdlite::cuda::Allocation team, int physical);
  Error bind_to_team(hvdlite::cuda::Allocation team, hvdlite::cuda::Allocation allocation, std::size_t nbytes);
  Error unbind_from_team(hvdlite::cuda::Allocation team, int physical, std::size_t nbytes);
  // What is at an address of a team; ends the process where nothing is, or no access was allowed.
  hvdlite::kernels::Bound bound_to(Address address);

  Error reserve(Address* address, std::size_t nbytes);
  Error unreserve(Address address, std::size_t nbytes);
  Error map(Address address, std::size_t nbytes, hvdlite::cuda::Allocation allocation);
  // A whole mapping.
  Error unmap(Address address, std::size_t nbytes);
  // Whole mappings.
  Error allow(Address address, std::size_t nbytes, const hvdlite::cuda::Access* accesses, std::size_t count);

 private:
  struct File {
    int fd;
    std::size_t nbytes;
    int physical;  // the device
    bool is_exportable;
    std::shared_ptr<MulticastTeam> team = nullptr;  // that it stands for, whose file it is; null: memory
  };
  struct Mapping {
    std::size_t nbytes;
    int physical;
    std::shared_ptr<MulticastTeam> team = nullptr;
    bool is_allowed = false;
  };

  std::shared_ptr<MulticastTeam> team(hvdlite::cuda::Allocation allocation);
  bool is_reserved(Address address, std::size_t nbytes) const;

  std::mutex mutex_;
  hvdlite::cuda::Allocation made_ = 0;
  std::map<hvdlite::cuda::Allocation, File> files_;
  std::map<Address, std::size_t> reserved_;
  std::map<Address, Mapping> mapped_;
};

VirtualMemory& virtual_memory();

}  // namespace gpusim
