// Ends the process when something takes too long that Python cannot interrupt, such as MPI_Init.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "waiting/signal.h"

namespace hvdlite {

// A thread of its own that needs no GIL. Unless cancelled within `seconds` it writes `message` to stderr, runs the
// program `explain`, if any, for a few seconds, and calls _exit(exit_code). Destroying it cancels it. In a forked
// child, which has no such thread, it does nothing. Time in which the process is stopped does not count.
class Deadline {
 public:
  // Where `after` names processes by their pidfds, which stay open meanwhile, the time begins with the end of the first
  // of them, and what it is called stands before the message.
  using Named = std::vector<std::pair<int, std::string>>;
  Deadline(double seconds, std::string message, int exit_code, std::vector<std::string> explain = {}, Named after = {});
  ~Deadline() { cancel(); }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

  void cancel();

 private:
  static void* watch(void* self);
  void await_end();
  void sleep();

  // Exchanged, so that either who cancels or the thread has its way, and nothing is read because of it: what the thread
  // needs was written before it began. The kernel compares before it sleeps, so no wake-up is missed.
  Word state_;
  double seconds_;
  Named after_;
  Clock::time_point until_;
  std::string message_;
  std::vector<std::string> explain_;
  int exit_code_;
  pid_t owner_;
  pthread_t thread_;
  bool joinable_ = false;
};

// From here on exit() ends the process without destructors of libraries, which may wait for other processes, once
// Python has ended; with its own exit status, or with `least` where that is 0.
void end_at_exit(int least);

}  // namespace hvdlite
