// NCCL as far as hvdlite calls it, loaded at run time: what was built without it runs with it.
//
// The only place that knows the vendor's names. A process has one NCCL: that of torch where torch has one, since a
// second copy would call functions of the first.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "gpu/cuda_driver.h"

namespace hvdlite::nccl {

using Result = int;
using Communicator = struct OpaqueCommunicator*;
using Window = struct OpaqueWindow*;

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as it was in 2.14, which later versions accept.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
static_assert(sizeof(Config) == 24, "as ncclConfig_t");

constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kOldest = 21400;  // the first whose calls need not block
constexpr int kSymmetric = 1;   // of windows: calls have the same place in them on every rank

// name in the table, exported symbol, result, parameters
#define HVDLITE_NCCL_FUNCTIONS(F)                                                                               \
  F(version, ncclGetVersion, Result, (int* version))                                                            \
  F(error_text, ncclGetErrorString, const char*, (Result))                                                      \
  F(last_error, ncclGetLastError, const char*, (Communicator))                                                  \
  F(unique_id, ncclGetUniqueId, Result, (UniqueId * id))                                                        \
  F(init, ncclCommInitRankConfig, Result, (Communicator * communicator, int size, UniqueId, int rank, Config*)) \
  F(async_error, ncclCommGetAsyncError, Result, (Communicator, Result * error))                                 \
  F(finalize, ncclCommFinalize, Result, (Communicator))                                                         \
  F(destroy, ncclCommDestroy, Result, (Communicator))                                                           \
  F(abort, ncclCommAbort, Result, (Communicator))                                                               \
  F(group_start, ncclGroupStart, Result, ())                                                                    \
  F(group_end, ncclGroupEnd, Result, ())                                                                        \
  F(all_reduce, ncclAllReduce, Result,                                                                          \
    (const void* from, void* to, std::size_t count, int dtype, int op, Communicator, cuda::Stream))             \
  F(reduce_scatter, ncclReduceScatter, Result,                                                                  \
    (const void* from, void* to, std::size_t count, int dtype, int op, Communicator, cuda::Stream))             \
  F(all_gather, ncclAllGather, Result,                                                                          \
    (const void* from, void* to, std::size_t count, int dtype, Communicator, cuda::Stream))                     \
  F(broadcast, ncclBroadcast, Result,                                                                           \
    (const void* from, void* to, std::size_t count, int dtype, int root, Communicator, cuda::Stream))           \
  F(reduce, ncclReduce, Result,                                                                                 \
    (const void* from, void* to, std::size_t count, int dtype, int op, int root, Communicator, cuda::Stream))

// Likewise; null where the library is older.
#define HVDLITE_LATER_NCCL_FUNCTIONS(F)                                                                               \
  F(buffer_register, ncclCommRegister, Result, (Communicator, void* memory, std::size_t n, void** handle))            \
  F(buffer_deregister, ncclCommDeregister, Result, (Communicator, void* handle))                                      \
  F(window_register, ncclCommWindowRegister, Result, (Communicator, void* memory, std::size_t n, Window*, int flags)) \
  F(window_deregister, ncclCommWindowDeregister, Result, (Communicator, Window))

struct Library {
#define HVDLITE_DECLARE(name, symbol, result, parameters) result(*name) parameters;
  HVDLITE_NCCL_FUNCTIONS(HVDLITE_DECLARE)
  HVDLITE_LATER_NCCL_FUNCTIONS(HVDLITE_DECLARE)
#undef HVDLITE_DECLARE
  std::string path;
  int version_code;  // as 22809 for 2.28.9
};

// The library of this process. Throws std::runtime_error with the reason where there is none, or too old a one.
//
// The first that is there: what `use_library` named; what the process has loaded; one of `wheels`; the system's.
const Library& load(const std::vector<std::string>& wheels);

// What `load` has returned. Throws std::runtime_error before.
const Library& library();

// To be called before the first call of `load`; empty: by itself.
void use_library(const std::string& path);

// 22809 as "2.28.9".
std::string version_name(int code);

// Throws std::runtime_error that names `what` and the error, unless `result` is success or "in progress".
void check(Result result, const char* what, Communicator communicator = nullptr);

}  // namespace hvdlite::nccl
