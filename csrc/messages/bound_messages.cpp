#include "messages/bound_messages.h"

#include "messages/working.h"

namespace hvdlite {

BoundMessages::Progress BoundMessages::start() {
  phase_ = moved_ = 0;
  moved_at_ = Clock::now();
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
    for (; wait_ < phase.waits.size(); ++wait_, ++moved_) {
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

BoundMessages::Progress BoundMessages::work(PoliteLook& look, std::chrono::microseconds limit,
                                            std::chrono::microseconds longest_nap) {
  return work_until_done(*this, moved_at_, look, limit, longest_nap);
}

}  // namespace hvdlite
