// Where the ranks of a node put few bytes for one another, with the least signalling there can be: every rank is waited
// for once.
#pragma once

#include <cstdint>
#include <vector>

#include "waiting/signal.h"

namespace hvdlite {

// There are two sets of places in shared memory, with a place per rank in each, and each rank counts the turns for
// which it has put something into a place. It does so, counts, waits until all ranks have counted as far, and reads
// what the others have put there.
//
// The sets take turns. Whoever writes into one has seen all counts of the turn before; a rank counted there when it had
// read what lay in this set before that. So nobody waits a second time.
//
// Within a set ranks change places: of two ranks each writes where it has just read what the other had written. On many
// processors a core that reads a line which another one has written gets it for itself, and would only have to give it
// back. For the same reason ranks should not read what they have written themselves (an allreduce on 2 cores of Zen 5,
// 4 KiB: 0.12 us, 0.24 where ranks stay in their places, 0.48 where they read these as well).
//
// A count is stored with release order after what was written, and loaded with acquire order before that is read.
// Counts on which somebody sleeps are Dekker's pattern: the sleeper says so, then looks at the count; the rank stores
// the count, then looks for sleepers; all sequentially consistent, but for the end of a sleep (`futex_wait`).
class PlacesInTurn {
 public:
  // Of a place. An allreduce by two ranks reads half as much otherwise, but waits twice (16 KiB: 0.68 us, 0.44 here);
  // more ranks read ever less.
  static constexpr std::uint64_t most_bytes(int size) { return size <= 2 ? 32 << 10 : 8 << 10; }

  // `address`: of `bytes_needed(size)` zeroed bytes, a multiple of 64; or counts of all ranks that are alike, from
  // which it goes on. `abort_address`: ends every wait.
  PlacesInTurn(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us);

  static std::size_t bytes_needed(int size);

  std::uint64_t most_bytes() const { return most_bytes_; }
  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }

  // A turn: `begin`, write into this rank's place, `publish`, `await_all`, read those of others, `end`. They may be
  // read until the next one begins.
  void begin();
  void publish();
  WaitStatus await_all(double timeout_s);
  void end() { has_begun_ = false; }
  std::uintptr_t place(std::uint32_t rank) const;

  // Whether this rank is in the middle of a turn.
  bool has_begun() const { return has_begun_; }
  // Whether `await_all` would not wait.
  bool all_have_begun() const;
  // All ranks have agreed, after the same number of turns, that the one that some of them have begun will not be done.
  void withdraw();

  // The ranks for which `await_all` has waited in vain.
  std::vector<int> late() const;
  // Makes every sleeper look at the abort word.
  void wake_all() const;

 private:
  struct Line;

  Line& line(std::uint32_t rank) const;
  bool has_come(std::uint32_t rank) const;
  WaitStatus sleep_until_all(Clock::time_point until);

  std::uintptr_t address_;
  Word* abort_;
  std::chrono::microseconds spin_;
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint64_t most_bytes_;
  std::uint32_t turn_ = 0;  // counts; may wrap
  bool has_begun_ = false;
};

}  // namespace hvdlite
