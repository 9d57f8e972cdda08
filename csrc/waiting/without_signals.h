// Threads of our own take no signals: those belong to Python's threads.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace hvdlite {

// A thread that starts while this lives inherits that all signals are blocked.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace hvdlite
