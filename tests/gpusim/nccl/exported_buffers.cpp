// Since NCCL 2.19.
#include <cstddef>

#include "communicator.h"

using namespace nccl_sim;

extern "C" {

int ncclCommRegister(void* handle, void* begin, std::size_t nbytes, void** buffer) {
  return Communicator::find(handle)->register_buffer(begin, nbytes, buffer);
}

int ncclCommDeregister(void* handle, void* buffer) {
  return Communicator::find(handle)->deregister(buffer, Kind::kBuffer), kSuccess;
}

// For tests: how many this process has.
int nccl_sim_buffers() { return RegisteredMemory::count(Kind::kBuffer); }
}
