// To go on with messages until they are through, with naps that leave the core to others.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "waiting/polite_look.h"
#include "waiting/signal.h"

namespace hvdlite {

// `messages.advance()` until it is not waiting, for up to `limit`; returns what that said last. At first it looks again
// and again, as long as nobody else needs the core. Naps grow while `messages.moved()` stays the same, up to `longest`
// while data moves, or begin with `messages.busy_for()` where that is known. `moved_at`: when something has moved last.
template <class Messages>
typename Messages::Progress work_until_done(Messages& messages, Clock::time_point& moved_at, PoliteLook& look,
                                            std::chrono::microseconds limit, std::chrono::microseconds longest) {
  // As in hvdlite/naps.py.
  constexpr std::chrono::microseconds kFirstNap(20);
  constexpr std::chrono::microseconds kMoving(50'000);  // a wait that lasts longer is for somebody who is late
  constexpr std::chrono::microseconds kIdleNap(2000);
  constexpr auto kWaiting = Messages::Progress::kWaiting;
  const auto until = Clock::now() + limit;
  for (;;) {  // each time that something moves
    const auto before = messages.moved();
    auto progress = kWaiting;
    const auto has_moved = [&] {
      progress = messages.advance();
      return progress != kWaiting || messages.moved() != before;
    };
    std::chrono::microseconds nap = messages.busy_for();
    bool moves = nap == nap.zero() ? look.until(has_moved) : has_moved();
    nap = std::max(nap, kFirstNap);
    const auto longest_here = std::max(nap, longest);
    while (!moves && Clock::now() < until) {
      std::this_thread::sleep_for(nap);
      moves = has_moved();
      nap = std::min(2 * nap, Clock::now() - moved_at < kMoving ? longest_here : kIdleNap);
    }
    if (moves) moved_at = Clock::now();
    if (progress != kWaiting || Clock::now() >= until) return progress;
  }
}

}  // namespace hvdlite
