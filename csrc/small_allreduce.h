// Allreduce of few bytes, with the least signalling there can be: every rank is waited for once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "elements.h"
#include "signal.h"
#include "tensor_reduction.h"

namespace hvdlite {

// There are two sets of places in shared memory, with a place per rank in each, and each rank counts the allreduces
// whose tensors it has put into a place. It packs all of its tensors, counts, waits until all ranks have counted as
// far, and reduces what the others have packed, and what it has itself, into its own tensors.
//
// The sets take turns. Whoever packs into one has seen all counts of the allreduce before; a rank counted there when
// it had read what lay in this set before that. So nobody waits a second time.
//
// Within a set ranks change places: of two ranks each packs where it has just read what the other had packed. On many
// processors a core that reads a line which another one has written gets it for itself, and would only have to give it
// back. For the same reason no rank reads what it has packed (2 cores of Zen 5, 4 KiB: 0.12 us, 0.24 where ranks stay
// in their places, 0.48 where they read these as well).
//
// A count is stored with release order after what was packed, and loaded with acquire order before that is read. Counts
// on which somebody sleeps are Dekker's pattern: the sleeper says so, then looks at the count; the rank stores the
// count, then looks for sleepers; all sequentially consistent, but for the end of a sleep (`futex_wait`).
class SmallAllreduce {
 public:
  // What lies in memory that all ranks can reach is reduced in less time where it is, if it is more than this.
  static constexpr std::uint64_t kMostBytesAtHome = 8 << 10;

  // Two ranks read half as much otherwise, but wait twice (16 KiB: 0.68 us, 0.44 here); more ranks read ever less.
  static constexpr std::uint64_t most_bytes(int size) { return size <= 2 ? 32 << 10 : 8 << 10; }

  // `address`: of `bytes_needed(size)` zeroed bytes, a multiple of 64; or counts of all ranks that are alike, from
  // which it goes on. `abort_address`: ends every wait.
  SmallAllreduce(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us);

  static std::size_t bytes_needed(int size);

  std::uint64_t most_bytes() const { return most_bytes_; }

  WaitStatus run(const TensorReduction& job, double timeout_s);

  // The first half of `run`, which then does the second: after it the other ranks do not wait for this one.
  void begin(const TensorReduction& job);
  // Of what has begun: whether the second half would not wait.
  bool all_have_begun() const;
  // All ranks have agreed, after the same number of `run`, that what some of them have begun will not be done.
  void withdraw();

  // The ranks for which the last `run` has waited in vain.
  std::vector<int> late() const;
  // Makes every sleeper look at the abort word.
  void wake_all() const;

 private:
  struct Line;

  Line& line(std::uint32_t rank) const;
  std::uintptr_t place(std::uint32_t rank) const;
  bool has_begun(std::uint32_t rank) const;
  std::uintptr_t own_source(const TensorReduction& job) const;
  WaitStatus finish(const TensorReduction& job, double timeout_s);
  WaitStatus await_all(Clock::time_point until);

  std::uintptr_t address_;
  Word* abort_;
  std::chrono::microseconds spin_;
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint64_t most_bytes_;
  std::unique_ptr<char[]> scratch_;  // of `most_bytes_`: what is not in one piece, or of another type, on its way
  std::uint32_t turn_ = 0;           // counts; may wrap
  bool has_begun_ = false;
};

}  // namespace hvdlite
