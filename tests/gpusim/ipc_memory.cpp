#include "ipc_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "devices.h"
#include "settings.h"
#include "unobserved.h"

namespace gpusim {

namespace cuda = hvdlite::cuda;

namespace {

// A process that ends closes its files one after the other.
constexpr std::chrono::milliseconds kPatience(200);

// What a handle says.
struct Export {
  int pid, fd, physical;
  std::uint64_t id;
  std::size_t nbytes, offset;  // in the file, which has whole pages
};
static_assert(sizeof(Export) <= sizeof(cuda::IpcHandle));

std::string name_of(std::uint64_t id) { return "gpusim-ipc-" + std::to_string(id); }

// The bytes from `from` on move to a file, which takes their place. Nothing works on them. -1: there is no more memory.
int moved_to_file(Address from, std::size_t nbytes, std::uint64_t id) {
  const int fd = memfd_create(name_of(id).c_str(), MFD_CLOEXEC);
  if (fd < 0) return -1;
  const bool is_written = write(fd, pointer<void>(from), nbytes) == static_cast<ssize_t>(nbytes);
  const int access = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_FIXED;
  if (is_written && mmap(pointer<void>(from), nbytes, access, flags, fd, 0) != MAP_FAILED) return fd;
  return close(fd), -1;
}

// -1: it is gone.
int file_of(const Export& exported) {
  const std::string path = "/proc/" + std::to_string(exported.pid) + "/fd/" + std::to_string(exported.fd);
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof target - 1) <= 0) return -1;
  if (std::string(target).find("/memfd:" + name_of(exported.id) + " ") != 0) return -1;
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

IpcMemory& ipc_memory() {
  static auto* all = new IpcMemory;
  return *all;
}

Error IpcMemory::export_handle(cuda::IpcHandle* handle, Address address) {
  if (!settings().ipc) return NOT_SUPPORTED;
  const Locked locked(mutex_);
  const auto block = memory().at(address);
  if (!block || block->kind != Block::Kind::kDevice || block->begin != address) return INVALID_VALUE;
  const Address from = page_of(address);
  const std::size_t offset = address - from;
  if (exported_.count(address) == 0) {
    const int fd = moved_to_file(from, offset + block->nbytes, block->id);
    if (fd < 0) return OUT_OF_MEMORY;
    exported_[address] = fd;
  }
  const int physical = context_of(block->ordinal)->physical;
  const Export exported{getpid(), exported_.at(address), physical, block->id, block->nbytes, offset};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &exported, sizeof exported);
  return SUCCESS;
}

Error IpcMemory::open(Address* address, const cuda::IpcHandle& handle, int ordinal) {
  if (!settings().ipc) return NOT_SUPPORTED;
  Export exported;
  std::memcpy(&exported, &handle, sizeof exported);
  if (exported.pid == getpid()) return INVALID_CONTEXT;
  if (!reaches(context_of(ordinal)->physical, exported.physical)) return PEER_ACCESS_UNSUPPORTED;
  const Locked locked(mutex_);
  const Key key{exported.pid, exported.id};
  for (auto& [begin, opened] : opened_) {
    if (opened.key == key) return ++opened.count, *address = begin, SUCCESS;
  }
  const int fd = file_of(exported);
  if (fd < 0 || flock(fd, LOCK_SH | LOCK_NB) != 0) return INVALID_VALUE;
  const std::size_t nbytes = exported.offset + exported.nbytes;
  void* all = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (all == MAP_FAILED) return ::close(fd), OUT_OF_MEMORY;
  *address = reinterpret_cast<Address>(all) + exported.offset;
  opened_[*address] = {key, fd, exported.nbytes, 1};
  memory().add(*address,
               {Block::Kind::kOpened, exported.nbytes, ordinal_of(exported.physical), std::uint64_t{1} << ordinal});
  return SUCCESS;
}

Error IpcMemory::close(Address address) {
  const Locked locked(mutex_);
  const auto found = opened_.find(address);
  if (found == opened_.end()) return INVALID_VALUE;
  if (--found->second.count > 0) return SUCCESS;
  memory().remove(address, Block::Kind::kOpened);
  free_pages(address, found->second.nbytes);
  flock(found->second.fd, LOCK_UN);  // processes that were forked have the file as well
  ::close(found->second.fd);
  opened_.erase(found);
  return SUCCESS;
}

void IpcMemory::withdraw(Address address) {
  const Locked locked(mutex_);
  const auto found = exported_.find(address);
  if (found == exported_.end()) return;
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  while (flock(found->second, LOCK_EX | LOCK_NB) != 0) {
    if (std::chrono::steady_clock::now() > limit) die("cuMemFree: another process has this memory open");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::close(found->second);
  exported_.erase(found);
}

}  // namespace gpusim
