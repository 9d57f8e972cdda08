// Since NCCL 2.27.
#include <cstddef>

#include "communicator.h"

using namespace nccl_sim;

extern "C" {

int ncclCommWindowRegister(void* handle, void* begin, std::size_t nbytes, void** window, int flags) {
  constexpr int kSymmetric = 1;
  const auto communicator = Communicator::find(handle);
  if (communicator->state() != kSuccess || flags != kSymmetric) return kInvalidArgument;
  communicator->register_window(begin, nbytes, window);
  return communicator->state();
}

int ncclCommWindowDeregister(void* handle, void* window) {
  return Communicator::find(handle)->deregister(window, Kind::kWindow), kSuccess;
}

// For tests: how many this process has.
int nccl_sim_windows() { return RegisteredMemory::count(Kind::kWindow); }
}
