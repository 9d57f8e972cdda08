#include "waiting/heartbeat.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "waiting/without_signals.h"

namespace hvdlite {

Heartbeat::Heartbeat(const std::vector<int>& sockets, double interval_s, std::string beat)
    : interval_(interval_s), beat_(std::move(beat)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), owner_(getpid()) {
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "Heartbeat: no descriptor");
  for (const int socket : sockets) links_.push_back({socket, {}});
  const WithoutSignals inherited;
  const int error = pthread_create(&thread_, nullptr, &Heartbeat::run, this);
  if (error != 0) {
    ::close(wake_);
    throw std::system_error(error, std::generic_category(), "Heartbeat: no thread");
  }
  is_open_ = true;
}

void Heartbeat::send(std::size_t index, const std::string& message) {
  bool is_left;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (!is_open_) return;  // the sockets may be closed, and their numbers others' by now
    Link& link = links_.at(index);
    link.unsent += message;
    flush(link);
    is_left = !link.unsent.empty();
  }
  if (is_left) eventfd_write(wake_, 1);
}

void Heartbeat::rest(std::size_t index) {
  const std::lock_guard<std::mutex> locked(mutex_);
  links_.at(index).beats = false;
}

void Heartbeat::close(double patience_s) {
  const bool is_owner = getpid() == owner_;
  {
    std::unique_lock<std::mutex> locked(mutex_, std::defer_lock);
    if (is_owner) locked.lock();  // in a forked child nobody might ever unlock it
    if (!is_open_) return;
    is_open_ = false;
  }
  if (is_owner) {
    end_by_ = time_after(patience_s);
    is_ending_ = true;
    eventfd_write(wake_, 1);
    pthread_join(thread_, nullptr);
  }
  ::close(wake_);
}

void* Heartbeat::run(void* self) {
  static_cast<Heartbeat*>(self)->speak();
  return nullptr;
}

void Heartbeat::speak() {
  std::vector<pollfd> watched;
  Clock::time_point next_beat = Clock::now();
  while (true) {
    const auto now = Clock::now();
    const bool is_ending = is_ending_;
    if (is_ending && (now >= end_by_ || !has_unsent())) return;
    if (!is_ending && now >= next_beat) {
      beat();
      next_beat = now + std::chrono::duration_cast<Clock::duration>(interval_);
    }
    watched.assign(1, {wake_, POLLIN, 0});
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      for (const Link& link : links_) {
        if (!link.unsent.empty()) watched.push_back({link.socket, POLLOUT, 0});
      }
    }
    const auto until = is_ending ? end_by_ : next_beat;
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count() + 1;
    poll(watched.data(), watched.size(), static_cast<int>(std::clamp<long>(wait, 0, 60'000)));
    eventfd_t ignored;
    eventfd_read(wake_, &ignored);
    const std::lock_guard<std::mutex> locked(mutex_);
    for (Link& link : links_) flush(link);
  }
}

void Heartbeat::flush(Link& link) {
  if (link.unsent.empty()) return;
  const ssize_t sent = ::send(link.socket, link.unsent.data(), link.unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent >= 0) {
    link.unsent.erase(0, static_cast<std::size_t>(sent));
  } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    link.unsent.clear();  // it is gone, which whoever reads will find
    link.beats = false;
  }
}

bool Heartbeat::has_unsent() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return std::any_of(links_.begin(), links_.end(), [](const Link& link) { return !link.unsent.empty(); });
}

void Heartbeat::beat() {
  const std::lock_guard<std::mutex> locked(mutex_);
  for (Link& link : links_) {
    if (!link.beats || !link.unsent.empty()) continue;
    link.unsent = beat_;
    flush(link);
  }
}

}  // namespace hvdlite
