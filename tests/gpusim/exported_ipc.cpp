#include "exported.h"
#include "ipc_memory.h"

namespace hvdlite::cuda {

using namespace gpusim;

Result cuIpcGetMemHandle(IpcHandle* handle, Address address) {
  GPUSIM_NEEDS_CONTEXT;
  return ipc_memory().export_handle(handle, address);
}

Result cuIpcOpenMemHandle_v2(Address* address, IpcHandle handle, unsigned flags) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_REQUIRE(flags == kLazyPeerAccess, INVALID_VALUE);
  return ipc_memory().open(address, handle, current()->ordinal);
}

Result cuIpcCloseMemHandle(Address address) {
  GPUSIM_NEEDS_CONTEXT;
  return ipc_memory().close(address);
}

}  // namespace hvdlite::cuda
