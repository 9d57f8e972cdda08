#include "multicast_team.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "results.h"

namespace gpusim {

struct MulticastTeam::Shared {
  static constexpr int kMost = 64;
  enum State : int { kOutside, kAdded, kBound };

  struct Member {
    std::atomic<int> state;
    int pid, file;  // whose memory is bound, and as what that process has it open
  };

  unsigned devices;
  std::size_t nbytes;
  std::atomic<unsigned> added;
  Member members[kMost];
};

namespace {

const char* const kTeamName = "gpusim-multicast";

// What a process has bound is gone when it ends, in order or not.
void unbind_at_exit(std::atomic<int>* state, int after) {
  static auto* bound = new std::vector<std::pair<std::atomic<int>*, int>>;
  if (bound->empty()) {
    std::atexit([] {
      for (const auto& [state, after] : *bound) state->store(after);
    });
  }
  bound->emplace_back(state, after);
}

}  // namespace

std::shared_ptr<MulticastTeam> MulticastTeam::create(unsigned devices, std::size_t nbytes) {
  const int fd = memfd_create(kTeamName, MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  if (ftruncate(fd, sizeof(Shared)) != 0) return close(fd), nullptr;
  auto team = opened(fd);
  close(fd);
  if (team != nullptr) {
    team->shared_->devices = devices;
    team->shared_->nbytes = nbytes;
  }
  return team;
}

std::shared_ptr<MulticastTeam> MulticastTeam::opened(int fd) {
  char target[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), target, sizeof target - 1) <= 0) return nullptr;
  if (std::string(target).find(std::string("/memfd:") + kTeamName + " ") != 0) return nullptr;
  void* page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return nullptr;
  return std::shared_ptr<MulticastTeam>(new MulticastTeam(fcntl(fd, F_DUPFD_CLOEXEC, 0), static_cast<Shared*>(page)));
}

// The page stays mapped, since what happens at exit writes to it.
MulticastTeam::~MulticastTeam() {
  for (const auto& [physical, address] : mapped_) munmap(pointer<void>(address), shared_->nbytes);
  close(fd_);
}

std::size_t MulticastTeam::nbytes() const { return shared_->nbytes; }

bool MulticastTeam::add(int physical) {
  int outside = Shared::kOutside;
  if (physical >= Shared::kMost || is_complete()) return false;
  if (!shared_->members[physical].state.compare_exchange_strong(outside, Shared::kAdded)) return false;
  shared_->added.fetch_add(1);
  return true;
}

bool MulticastTeam::is_complete() const { return shared_->added.load() == shared_->devices; }

bool MulticastTeam::bind(int physical, int file) {
  Shared::Member& member = shared_->members[physical];
  if (member.state.load() != Shared::kAdded) return false;
  member.pid = getpid();
  member.file = fcntl(file, F_DUPFD_CLOEXEC, 0);
  member.state.store(Shared::kBound);
  unbind_at_exit(&member.state, Shared::kAdded);
  return true;
}

bool MulticastTeam::unbind(int physical) {
  Shared::Member& member = shared_->members[physical];
  if (member.state.load() != Shared::kBound || member.pid != getpid()) return false;
  member.state.store(Shared::kAdded);
  close(member.file);
  return true;
}

hvdlite::kernels::Bound MulticastTeam::at(std::size_t offset) {
  hvdlite::kernels::Bound bound{};
  for (int physical = 0; physical < Shared::kMost; ++physical) {
    const Shared::Member& member = shared_->members[physical];
    const int state = member.state.load();
    if (state == Shared::kOutside) continue;
    if (state != Shared::kBound) die("multicast: memory of device %d is not bound", physical);
    Address& begin = mapped_[physical];
    if (begin == 0) {
      const std::string path = "/proc/" + std::to_string(member.pid) + "/fd/" + std::to_string(member.file);
      const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (fd < 0) die("multicast: the process that has bound memory of device %d is gone", physical);
      void* all = mmap(nullptr, shared_->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (all == MAP_FAILED) die("multicast: no addresses are left");
      begin = reinterpret_cast<Address>(all);
      close(fd);
    }
    bound.copies[bound.count++] = begin + offset;
  }
  if (bound.count != shared_->devices) die("multicast: %u of %u devices are there", bound.count, shared_->devices);
  hvdlite::kernels::Bound turned = bound;  // neighbours are added up in other orders
  for (unsigned i = 0; i < bound.count; ++i) turned.copies[i] = bound.copies[(i + offset / 16) % bound.count];
  return turned;
}

}  // namespace gpusim
