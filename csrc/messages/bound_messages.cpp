#include "messages/bound_messages.h"

namespace hvdlite {

BoundMessages::Progress BoundMessages::start() {
  phase_ = 0;
  return begin_phase() ? advance() : Progress::kFailed;
}

bool BoundMessages::begin_phase() {
  wait_ = 0;
  if (phase_ == phases_.size()) return true;
  for (const std::uintptr_t request : phases_[phase_].starts) {
    error_ = mpi_.start(request);
    if (error_ != 0) return false;
  }
  return true;
}

BoundMessages::Progress BoundMessages::advance() {
  while (phase_ != phases_.size()) {
    const Phase& phase = phases_[phase_];
    for (; wait_ < phase.waits.size(); ++wait_) {
      bool is_done = false;
      error_ = mpi_.test(phase.waits[wait_].request, is_done);
      if (error_ != 0) return Progress::kFailed;
      if (!is_done) return Progress::kWaiting;
    }
    for (const Addition& addition : phase.additions) addition.run();
    ++phase_;
    if (!begin_phase()) return Progress::kFailed;
  }
  return Progress::kDone;
}

}  // namespace hvdlite
