// A long schedule of messages and additions, bound to its memory: hvdlite/collectives/pipeline.py without Python.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "messages/bound_messages.h"
#include "messages/mpi_functions.h"
#include "waiting/polite_look.h"
#include "waiting/signal.h"

namespace hvdlite {

class BoundPipeline {
 public:
  using Addition = BoundMessages::Addition;
  using Progress = BoundMessages::Progress;

  // To `peer`, once the first `after` receives are taken in.
  struct Send {
    std::uintptr_t request;
    int peer;
    std::size_t after;
  };
  // From `peer`, taken in once the first `after` sends have left; what has a slot is received before that, and added.
  struct Receive {
    std::uintptr_t request;
    int peer;
    std::size_t after;
    bool has_slot;
    std::vector<Addition> additions;
  };

  // Requests are persistent, and live as long. `first`: what is done before anything is sent. `window`: pieces that are
  // on their way at a time, in each direction; receive i has slot i % window.
  BoundPipeline(MpiFunctions mpi, std::vector<Addition> first, std::vector<Send> sends, std::vector<Receive> receives,
                std::size_t window)
      : mpi_(mpi),
        first_(std::move(first)),
        sends_(std::move(sends)),
        receives_(std::move(receives)),
        window_(window) {}

  // Executes as much as need not wait. Once it is done it may be started again; where it has failed, never.
  Progress start();
  // Of what was started: the same.
  Progress advance();
  // Goes on until all is done, for up to `limit`. Between looks it sleeps: while data moves for up to `longest_nap`, or
  // as long as what has been posted keeps the network busy.
  Progress work(PoliteLook& look, std::chrono::microseconds limit, std::chrono::microseconds longest_nap);

  // Whom it waits for.
  int peer() const { return taken_ < receives_.size() ? receives_[taken_].peer : sends_.back().peer; }
  // How many messages have come or left; not all that have left are known.
  std::size_t moved() const { return taken_ + left_; }
  // How long what has been posted keeps the network busy, with a margin; 0 where nobody knows, or it is short.
  std::chrono::microseconds busy_for() const;
  // What MPI has returned where it failed.
  int error() const { return error_; }

 private:
  bool send_ready();
  bool post_receives();
  bool take_next();
  bool have_left(std::size_t count);

  MpiFunctions mpi_;
  std::vector<Addition> first_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  std::size_t window_;
  std::size_t sent_ = 0;    // of `sends_`, those that were started
  std::size_t left_ = 0;    // and of them, from the first, that are done
  std::size_t posted_ = 0;  // of `receives_`
  std::size_t taken_ = 0;   // and of them, that have come and are added
  int error_ = 0;
  Clock::time_point first_came_{};
  Clock::time_point moved_at_{};
};

}  // namespace hvdlite
