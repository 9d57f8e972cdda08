// To look for something for a while, without going to sleep.
#pragma once

#include <sched.h>

#include "waiting/signal.h"

namespace hvdlite {

constexpr int kPausesPerClockRead = 16;  // a pause takes 10 to 140 cycles, reading the clock about 60

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // what others measured to be nearest to x86's pause; `yield` is a no-op on most cores
#endif
}

// Looks until `happened` or `until` has come, and at least once; whether it happened.
template <class Condition>
bool spin_until(Clock::time_point until, Condition happened) {
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (happened()) return true;
      pause();
    }
    sched_yield();  // whoever is waited for may need this very core
  } while (Clock::now() < until);
  return false;
}

}  // namespace hvdlite
