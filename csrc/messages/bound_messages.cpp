#include "messages/bound_messages.h"

namespace hvdlite {
namespace {

// Which nobody reads. MPI_STATUS_IGNORE is a constant of each MPI; the largest status has 32 bytes.
struct alignas(16) AnyStatus {
  char bytes[256];
};

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

BoundMessages::Progress BoundMessages::start() {
  phase_ = 0;
  return begin_phase() ? advance() : Progress::kFailed;
}

bool BoundMessages::begin_phase() {
  wait_ = 0;
  if (phase_ == phases_.size()) return true;
  for (const std::uintptr_t request : phases_[phase_].starts) {
    error_ = mpi_.start(at(request));
    if (error_ != 0) return false;
  }
  return true;
}

BoundMessages::Progress BoundMessages::advance() {
  AnyStatus status;
  while (phase_ != phases_.size()) {
    const Phase& phase = phases_[phase_];
    for (; wait_ < phase.waits.size(); ++wait_) {
      int is_done = 0;
      error_ = mpi_.test(at(phase.waits[wait_].request), &is_done, &status);
      if (error_ != 0) return Progress::kFailed;
      if (is_done == 0) return Progress::kWaiting;
    }
    for (const Addition& addition : phase.additions) {
      addition.reducer.reduce(addition.destinations, addition.sources, 0, addition.numel);
    }
    ++phase_;
    if (!begin_phase()) return Progress::kFailed;
  }
  return Progress::kDone;
}

}  // namespace hvdlite
