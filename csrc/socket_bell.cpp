#include "socket_bell.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "without_signals.h"

namespace hvdlite {
namespace {

constexpr int kStop = -1;

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
    const std::uint64_t one = 1;
    if (write(stop_, &one, sizeof one) != sizeof one) std::terminate();  // an eventfd takes 2^64 - 2 of these
    pthread_join(thread_, nullptr);
  }
  ::close(epoll_);
  ::close(stop_);
}

void* SocketBell::watch(void* self) {
  const auto& own = *static_cast<SocketBell*>(self);
  constexpr int kMost = 16;
  epoll_event events[kMost];
  while (true) {
    const int count = epoll_wait(own.epoll_, events, kMost, -1);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == kStop) return nullptr;
    }
    if (count > 0) own.bell_.ring();
  }
}

}  // namespace hvdlite
