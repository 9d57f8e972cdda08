// Ends the process when something takes too long that Python cannot interrupt, such as MPI_Init.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <string>

#include "signal.h"

namespace hvdlite {

// A thread of its own that needs no GIL. Unless cancelled within `seconds` it writes `message` to stderr and calls
// _exit(exit_code). Destroying it cancels it. In a forked child, which has no such thread, it does nothing.
class Deadline {
 public:
  Deadline(double seconds, std::string message, int exit_code);
  ~Deadline() { cancel(); }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

  void cancel();

 private:
  static void* watch(void* self);

  Word state_;
  Clock::time_point until_;
  std::string message_;
  int exit_code_;
  pid_t owner_;
  pthread_t thread_;
  bool joinable_ = false;
};

}  // namespace hvdlite
