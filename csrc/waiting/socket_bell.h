// Rings a doorbell for what comes from other hosts, so that one sleep waits for them and for the ranks of this node.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <vector>

#include "waiting/signal.h"

namespace hvdlite {

// A thread of its own that needs no GIL and never reads: it rings `bell` whenever bytes arrive at one of `sockets`, its
// other end closes, or it takes bytes again after it has refused some. In a forked child, which has no such thread,
// it does nothing. Sockets stay open at least until `close`.
//
// A program may close descriptors that are not its own, as daemons do. Then nobody tells the thread of bytes any more:
// it rings now and then instead, for whoever is rung to find out.
class SocketBell {
 public:
  SocketBell(const std::vector<int>& sockets, Doorbell& bell);
  ~SocketBell() { close(); }
  SocketBell(const SocketBell&) = delete;
  SocketBell& operator=(const SocketBell&) = delete;

  void close();

 private:
  static void* watch(void* self);

  Doorbell& bell_;
  int epoll_;
  int stop_;
  pid_t owner_;
  pthread_t thread_;
  // Nothing is read because of them: what `close` does after the thread has ended, the join orders.
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> is_robbed_{false};
  bool is_open_ = false;
};

}  // namespace hvdlite
