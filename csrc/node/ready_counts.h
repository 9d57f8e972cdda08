// How much of the frozen plan each rank of a node is ready for, in shared memory, and a wait until all are; and which
// plan they want instead.
#pragma once

#include <cstdint>

#include "waiting/signal.h"

namespace hvdlite {

// One line per rank, which only that rank writes; zeroed memory is valid. A count
// belongs to the plan whose number is stored with it, so that nobody takes the count of an earlier plan for one of
// this.
//
// Whoever completes a count rings those that want it, and stirs those that sleep here until it is: that is no news for
// anybody else. Two ranks that store their counts at the same time, and then look at all: at least one of them sees
// that all are there. A rank that wants a ring, or to be stirred, says so before it looks for the last time: either it
// sees the last count, or whoever stores that sees what it wants. Both are Dekker's pattern, and need sequentially
// consistent stores and loads; these release and acquire as well, so that what a rank has written before it counts is
// seen by whoever sees the count. A rank loads its own words relaxed: nobody else writes them.
//
// Wishes are told in the same way. Whether all want the same is decided once for each plan, by whoever comes first to
// one word: who sees that they do, or who waits no longer, and only after having said what it wants itself. So nobody
// leaves a plan that another goes on with.
class ReadyCounts {
 public:
  // `address`: `size` lines. `doorbells`: of the ranks, a line each.
  ReadyCounts(std::uintptr_t address, std::uintptr_t doorbells, int rank, int size);

  enum class Outcome { kAllReady, kAllReadyAndRung, kNotYet };

  // This rank's count; rings who wants to know that all ranks are ready for more than before.
  void set(std::uint64_t plan, std::uint64_t count);
  // The smallest count of all ranks.
  std::uint64_t all(std::uint64_t plan) const;
  // Whether this rank is rung.
  void want_ring(bool wanted);

  // Whether this rank was rung since it had counted `heard` rings.
  bool has_news(std::uint32_t heard) const;

  // Until all ranks are ready for `count` operations. It looks for `spin`, then sleeps on this rank's doorbell, as the
  // assistant of the thread that usually does: any ring ends it with kNotYet, as do `until` and a signal. `heard`: the
  // count of rings when this rank has last looked at all else; if it differs, nothing is waited for. After kNotYet this
  // rank wants a ring. kAllReadyAndRung: there may be more than that to look at, of which the thread that usually
  // sleeps does not know.
  Outcome await(std::uint64_t plan, std::uint64_t count, std::uint32_t heard, Clock::time_point until,
                std::chrono::microseconds spin);

  // A sleep like that until `happened`, or rung, of something else, after whose sequentially consistent store `stir` is
  // called; for `happened`, `until` and `next_look` see Doorbell::assist_until.
  template <class Condition, class NextLook>
  void sleep_until(Condition happened, std::uint32_t heard, Clock::time_point until, NextLook next_look);
  // Of another rank.
  void stir(std::uint32_t rank) const { doorbell(rank).stir(); }
  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }

  // By a rank that has done all of `plan` that it has said to be ready for, and wants `next` instead, a number of at
  // most kNextBits bits: whether all ranks want the same; so `plan` has ended for all of them, here. If not, nobody
  // will hear that of this plan: one goes on with it, wants something else, was rung, or `until` has come. For `heard`
  // and `spin` see `await`.
  bool agree(std::uint64_t plan, std::uint64_t next, std::uint32_t heard, Clock::time_point until,
             std::chrono::microseconds spin);
  static constexpr int kNextBits = 24;

 private:
  struct Line;
  // When a count is complete.
  enum Want : std::uint32_t { kNothing = 0, kRing = 1, kStir = 2 };

  template <class Condition>
  Outcome await_that(Condition holds, std::uint32_t heard, Clock::time_point until, std::chrono::microseconds spin);
  bool all_want(std::uint64_t wish) const;
  bool somebody_differs(std::uint64_t plan, std::uint64_t wish) const;
  bool is_decided(std::uint64_t plan) const;
  bool decide(std::uint64_t plan, bool has_ended);
  void want(Want wanted);
  void tell_who_wants() const;
  Line& line(std::uint32_t rank) const;
  Doorbell& doorbell(std::uint32_t rank) const { return *reinterpret_cast<Doorbell*>(doorbells_ + kCacheLine * rank); }

  std::uintptr_t address_;
  std::uintptr_t doorbells_;
  std::uint32_t rank_;
  std::uint32_t size_;
};

template <class Condition, class NextLook>
void ReadyCounts::sleep_until(Condition happened, std::uint32_t heard, Clock::time_point until, NextLook next_look) {
  Doorbell& own = doorbell(rank_);
  own.begin_assistance();
  own.assist_until([&] { return happened() || has_news(heard); }, until, next_look);
  if (own.end_assistance(heard) != heard) own.ring();  // which the thread that usually sleeps has not heard
}

}  // namespace hvdlite
