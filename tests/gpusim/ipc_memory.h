// Memory of cuMemAlloc that other processes open by handles: a file in memory, from its export on.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "gpu/cuda_driver.h"
#include "memory.h"
#include "results.h"

namespace gpusim {

class IpcMemory {
 public:
  // Of a whole allocation.
  Error export_handle(hvdlite::cuda::IpcHandle* handle, Address address);
  // For the device of that ordinal. The same address, where the process has it open already.
  Error open(Address* address, const hvdlite::cuda::IpcHandle& handle, int ordinal);
  Error close(Address address);
  // Of an allocation that is about to be freed: ends this process if another one has it open.
  void withdraw(Address address);

 private:
  using Key = std::pair<int, std::uint64_t>;  // the process that made it, and its number there

  struct Opened {
    Key key;
    int fd;  // locked as long as it is open, which the one who made it sees
    std::size_t nbytes;
    int count;
  };

  std::mutex mutex_;
  std::map<Address, int> exported_;  // their files
  std::map<Address, Opened> opened_;
};

IpcMemory& ipc_memory();

}  // namespace gpusim
