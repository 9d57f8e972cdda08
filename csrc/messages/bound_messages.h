// A short schedule of messages and additions, bound to its memory: hvdlite/collectives/bound.py without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/reduce.h"
#include "messages/mpi_functions.h"

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

  // Requests go back to MPI: from here on nothing else is called.
  void close() { is_closed_ = true; }
  bool is_closed() const { return is_closed_; }

  // Whom it waits for.
  int peer() const { return phases_[phase_].waits[wait_].peer; }
  // What MPI has returned where it failed.
  int error() const { return error_; }

 private:
  bool begin_phase();

  MpiFunctions mpi_;
  std::vector<Phase> phases_;
  std::size_t phase_ = 0;  // the one whose requests are waited for
  std::size_t wait_ = 0;   // the first of them that is not done
  int error_ = 0;
  bool is_closed_ = false;
};

}  // namespace hvdlite
