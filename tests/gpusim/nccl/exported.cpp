// libnccl.so.2 for machines without a GPU, as far as hvdlite calls it: between processes, on the streams of the
// simulated driver that GPUSIM_CUDA_LIBRARY names. HVDLITE_NCCL_LIBRARY names it itself.
//
// An operation is done on a rank once that rank has sent and received its part, others may be behind; it waits for its
// peers forever, whatever became of them, until it is aborted.
//
// It is stricter than NCCL where NCCL's behaviour depends on luck: communicators are non-blocking ones, whose
// operations reach the stream late (GPUSIM_JITTER_US) and by another thread, and whose abort takes as long; to call one
// that is not ready is an error, and one that has been given back ends the process. So does a broken rule of registered
// memory.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "communicator.h"
#include "driver.h"
#include "elements.h"

using namespace nccl_sim;

namespace {

// What a thread has called since its outermost ncclGroupStart.
struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::shared_ptr<Communicator> communicator;
  void* stream = nullptr;
};
thread_local Group group;

Result start_group() {
  ++group.depth;
  return kSuccess;
}

Result end_group() {
  if (group.depth == 0) return kInvalidUsage;
  if (--group.depth > 0) return kSuccess;
  Group ended;
  std::swap(ended, group);
  if (ended.operations.empty()) return kSuccess;
  ended.communicator->enqueue(std::move(ended.operations), ended.stream);
  return kInProgress;
}

bool is_on_device(const void* memory) { return allocation_at(memory).has_value(); }

// `parts` of one call, each of `what` but for the root.
Result call(void* handle, void* stream, Description what, const void* from, void* to, std::vector<Operation> parts) {
  const auto communicator = Communicator::find(handle);
  if (communicator->state() != kSuccess) return kInvalidArgument;
  if (what.dtype < 0 || what.dtype >= kTypes || what.op < 0 || what.op > 3) return kInvalidArgument;
  if (what.root < 0 || what.root >= communicator->size()) return kInvalidArgument;
  if (what.count == 0) return kSuccess;
  if (!is_on_device(from) || !is_on_device(to)) return kInvalidArgument;
  if (group.communicator != nullptr && (group.communicator != communicator || group.stream != stream)) {
    return kInvalidUsage;  // more than hvdlite does
  }
  start_group();
  group.communicator = communicator;
  group.stream = stream;
  group.operations.insert(group.operations.end(), parts.begin(), parts.end());
  return end_group();
}

Operation reduce_operation(void* handle, Description what, const void* from, void* to) {
  what.kind = kReduceToRoot;
  what.place = Communicator::find(handle)->place_of(from);
  const bool is_root = Communicator::find(handle)->rank() == what.root;
  return {what, static_cast<const char*>(from), is_root ? static_cast<char*>(to) : nullptr};
}

Operation broadcast_operation(void* handle, Description what, const void* from, void* to) {
  what.kind = kBroadcast;
  what.place = Communicator::find(handle)->place_of(to);
  const bool is_root = Communicator::find(handle)->rank() == what.root;
  return {what, is_root ? static_cast<const char*>(from) : nullptr, static_cast<char*>(to)};
}

std::size_t block_bytes(const Description& what) {
  return what.dtype < 0 || what.dtype >= kTypes ? 0 : what.count * item_bytes(what.dtype);
}

}  // namespace

extern "C" {

struct UniqueId {
  char bytes[128];
};
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

// For tests: what every communicator of this process reports from now on.
void nccl_sim_fail(int result) { injected = result; }
// For tests: so many registrations of this process fail from now on.
void nccl_sim_refuse(int registrations) { refusals = registrations; }
// For tests: communicators of this process that have not been given back.
int nccl_sim_living() { return Communicator::living(); }

int ncclGetVersion(int* version) {
  const char* set = std::getenv("GPUSIM_NCCL_VERSION");
  return *version = set == nullptr ? 22809 : std::atoi(set), kSuccess;
}
const char* ncclGetErrorString(int result) {
  const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                         "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return texts[result];
}
const char* ncclGetLastError(void*) { return "simulated"; }

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<std::uint64_t> made{0};
  const int file = memfd_create("nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return kSystem;
  const Place place{std::uint64_t(getpid()) << 32 | ++made, getpid(), file};
  if (pwrite(file, &place.nonce, sizeof place.nonce, 0) != sizeof place.nonce) return kSystem;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &place, sizeof place);
  return kSuccess;
}

int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, const Config* config) {
  constexpr unsigned kMagic = 0xcafebeef;
  if (config == nullptr || config->magic != kMagic || config->size < sizeof *config || config->blocking != 0) {
    return kInvalidArgument;
  }
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) return kInvalidArgument;
  Place place;
  std::memcpy(&place, &id, sizeof place);
  const auto communicator = std::make_shared<Communicator>(rank, size);
  *handle = communicator->publish();
  communicator->connect(place);
  return communicator->state();  // which may be an error already, of a communicator that there is nevertheless
}

int ncclCommGetAsyncError(void* handle, int* error) { return *error = Communicator::find(handle)->state(), kSuccess; }
int ncclCommFinalize(void* handle) {
  const auto communicator = Communicator::find(handle);
  if (communicator->state() != kSuccess) return kInvalidArgument;
  return communicator->finalize(), kInProgress;
}
int ncclCommDestroy(void* handle) { return Communicator::remove(handle)->destroy(), kSuccess; }
int ncclCommAbort(void* handle) { return Communicator::remove(handle)->abort(), kSuccess; }

int ncclGroupStart() { return start_group(); }
int ncclGroupEnd() { return end_group(); }

int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int op, void* handle, void* stream) {
  const Description what{kReduceToAll, dtype, op, 0, count, Communicator::find(handle)->place_of(from)};
  return call(handle, stream, what, from, to, {{what, static_cast<const char*>(from), static_cast<char*>(to)}});
}
int ncclReduce(const void* from, void* to, std::size_t count, int dtype, int op, int root, void* handle, void* stream) {
  const Description what{kReduceToRoot, dtype, op, root, count};
  return call(handle, stream, what, from, to, {reduce_operation(handle, what, from, to)});
}
int ncclBroadcast(const void* from, void* to, std::size_t count, int dtype, int root, void* handle, void* stream) {
  const Description what{kBroadcast, dtype, 0, root, count};
  return call(handle, stream, what, from, to, {broadcast_operation(handle, what, from, to)});
}
int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int op, void* handle, void* stream) {
  Description what{kReduceToRoot, dtype, op, 0, count};
  std::vector<Operation> parts;
  for (; what.root < Communicator::find(handle)->size(); ++what.root) {
    const char* block = static_cast<const char*>(from) + std::size_t(what.root) * block_bytes(what);
    parts.push_back(reduce_operation(handle, what, block, to));
  }
  what.root = 0;
  return call(handle, stream, what, from, to, std::move(parts));
}
int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, void* handle, void* stream) {
  Description what{kBroadcast, dtype, 0, 0, count};
  std::vector<Operation> parts;
  for (; what.root < Communicator::find(handle)->size(); ++what.root) {
    char* block = static_cast<char*>(to) + std::size_t(what.root) * block_bytes(what);
    parts.push_back(broadcast_operation(handle, what, from, block));
  }
  what.root = 0;
  return call(handle, stream, what, from, to, std::move(parts));
}
}
