// Speaks to a rank's neighbours, and lets them know that this process lives while nothing else is said.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "waiting/signal.h"

namespace hvdlite {

// A thread of its own that needs no GIL: a process that is busy in a long call of C lives all the same. Each message is
// sent whole, in the order of `send`, as far as the neighbour's kernel takes it; the rest waits here, and nobody waits
// for it. A neighbour that reads nothing gets no more heartbeats, as it has enough to read.
class Heartbeat {
 public:
  // `sockets` stay open until this is closed. Throws std::system_error where the machine has no thread or descriptor.
  Heartbeat(const std::vector<int>& sockets, double interval_s, std::string beat);
  ~Heartbeat() { close(); }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // To the neighbour with the socket at `index`; never waits.
  void send(std::size_t index, const std::string& message);
  // No more heartbeats to that neighbour.
  void rest(std::size_t index);
  // Ends the thread once all is sent, or after `patience_s`. A forked child, which has no such thread, only closes
  // descriptors.
  void close(double patience_s = 0.0);

 private:
  struct Link {
    int socket;
    std::string unsent;
    bool beats = true;
  };

  static void* run(void* self);
  void speak();
  void flush(Link& link);
  bool has_unsent();
  void beat();

  std::mutex mutex_;  // guards links_ and is_open_
  std::vector<Link> links_;
  std::chrono::duration<double> interval_;
  std::string beat_;
  int wake_;  // an eventfd: something is left to send, or the end has come
  // Released after end_by_, which is read by who has acquired it.
  std::atomic<bool> is_ending_{false};
  Clock::time_point end_by_{};
  bool is_open_ = false;
  pid_t owner_;
  pthread_t thread_;
};

}  // namespace hvdlite
