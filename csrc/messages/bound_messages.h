// A short schedule of messages and additions, bound to its memory: hvdlite/collectives/bound.py without Python.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/reduce.h"
#include "messages/mpi_functions.h"
#include "waiting/polite_look.h"
#include "waiting/signal.h"

namespace hvdlite {

class BoundMessages {
 public:
  struct Wait {
    std::uintptr_t request;
    int peer;  // the rank at its other end
  };
  struct Addition {
    std::vector<std::uintptr_t> destinations;
    std::vector<std::uintptr_t> sources;
    std::uint64_t numel;
    Reducer reducer;

    void run() const { reducer.reduce(destinations, sources, 0, numel); }
  };
  // Start requests; wait for some; reduce.
  struct Phase {
    std::vector<std::uintptr_t> starts;
    std::vector<Wait> waits;
    std::vector<Addition> additions;
  };

  // Requests are persistent, and live as long.
  BoundMessages(MpiFunctions mpi, std::vector<Phase> phases) : mpi_(mpi), phases_(std::move(phases)) {}

  enum class Progress { kDone = 0, kWaiting = 1, kFailed = 2 };

  // Executes as much as need not wait. Once it is done it may be started again; where it has failed, never.
  Progress start();
  // Of what was started: the same.
  Progress advance();
  // Goes on until all is done, for up to `limit`, with naps of up to `longest_nap` while data moves.
  Progress work(PoliteLook& look, std::chrono::microseconds limit, std::chrono::microseconds longest_nap);

  // Requests go back to MPI: from here on nothing else is called.
  void close() { is_closed_ = true; }
  bool is_closed() const { return is_closed_; }

  // How many messages it has found to be through.
  std::size_t moved() const { return moved_; }
  // Whom it waits for.
  int peer() const { return phases_[phase_].waits[wait_].peer; }
  // How long it is of no use to look: not known.
  static std::chrono::microseconds busy_for() { return std::chrono::microseconds::zero(); }
  // What MPI has returned where it failed.
  int error() const { return error_; }

 private:
  bool begin_phase();

  MpiFunctions mpi_;
  std::vector<Phase> phases_;
  std::size_t phase_ = 0;  // the one whose requests are waited for
  std::size_t wait_ = 0;   // the first of them that is not done
  std::size_t moved_ = 0;
  int error_ = 0;
  bool is_closed_ = false;
  Clock::time_point moved_at_{};
};

}  // namespace hvdlite
