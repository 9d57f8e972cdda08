// To look for what other processes bring, as long as nobody else needs the core.
#pragma once

#include <sched.h>

#include <chrono>

#include "waiting/signal.h"

namespace hvdlite {

// An offer of the core that takes longer than `busy` was taken by somebody who computes: for `courtesy` from then on
// nothing is looked for more than once.
class PoliteLook {
 public:
  PoliteLook(std::chrono::microseconds longest, std::chrono::microseconds busy, std::chrono::microseconds courtesy)
      : longest_(longest), busy_(busy), courtesy_(courtesy) {}

  // Until `happened`, for as long as may be, and at least once; whether it happened.
  template <class Condition>
  bool until(Condition happened) {
    return until(happened, [] { sched_yield(); });
  }

  template <class Condition, class Offer>
  bool until(Condition happened, Offer offer_core) {
    if (happened()) return true;
    auto now = Clock::now();
    const auto end = now + longest_;
    while (now < end && now >= from_) {
      for (int i = 0; i < kLooks; ++i) {
        if (happened()) return true;
      }
      offer_core();  // whoever is waited for may need this very one
      const auto before = now;
      now = Clock::now();
      if (now - before > busy_) from_ = now + courtesy_;
    }
    return happened();
  }

 private:
  static constexpr int kLooks = 4;  // each is a call of MPI

  std::chrono::microseconds longest_;
  std::chrono::microseconds busy_;
  std::chrono::microseconds courtesy_;
  Clock::time_point from_{};
};

}  // namespace hvdlite
