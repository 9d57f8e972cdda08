#include "waiting/socket_bell.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "waiting/without_signals.h"

namespace hvdlite {
namespace {

constexpr int kStop = -1;
constexpr int kLookMs =
    5000;  // how often the thread looks whether it shall stop, should the descriptor for that be gone
constexpr int kRobbedMs = 20;  // between two rings of a thread that nobody tells of bytes

void throw_errno(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

bool watch_for(int epoll, int fd, std::uint32_t events, int what) {
  epoll_event event{};
  event.events = events;
  event.data.fd = what;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

SocketBell::SocketBell(const std::vector<int>& sockets, Doorbell& bell)
    : bell_(bell), epoll_(epoll_create1(EPOLL_CLOEXEC)), stop_(eventfd(0, EFD_CLOEXEC)), owner_(getpid()) {
  bool works = epoll_ >= 0 && stop_ >= 0 && watch_for(epoll_, stop_, EPOLLIN, kStop);
  // Edges, not levels: whoever reads is another thread, and may take its time.
  for (const int fd : sockets) works = works && watch_for(epoll_, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, fd);
  int error = works ? 0 : errno;
  if (error == 0) {
    const WithoutSignals inherited;
    error = pthread_create(&thread_, nullptr, &SocketBell::watch, this);
  }
  is_open_ = error == 0;
  if (is_open_) return;
  if (epoll_ >= 0) ::close(epoll_);
  if (stop_ >= 0) ::close(stop_);
  throw_errno(error, "SocketBell");
}

void SocketBell::close() {
  if (!is_open_) return;
  is_open_ = false;
  if (getpid() == owner_) {
    is_stopping_ = true;
    const std::uint64_t one = 1;
    if (!is_robbed_ && write(stop_, &one, sizeof one) != sizeof one) is_robbed_ = true;
    pthread_join(thread_, nullptr);
  }
  if (is_robbed_) return;  // the numbers may be somebody else's by now
  ::close(epoll_);
  ::close(stop_);
}

void* SocketBell::watch(void* self) {
  auto& own = *static_cast<SocketBell*>(self);
  constexpr int kMost = 16;
  epoll_event events[kMost];
  while (!own.is_stopping_) {
    const int count = epoll_wait(own.epoll_, events, kMost, kLookMs);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == kStop) return nullptr;
    }
    if (count > 0) own.bell_.ring();
    if (count < 0 && errno != EINTR) {
      own.is_robbed_ = true;
      poll(nullptr, 0, kRobbedMs);
      own.bell_.ring();
    }
  }
  return nullptr;
}

}  // namespace hvdlite
