// Allreduce of a few KiB, with the least signalling there can be: every rank is waited for once.
#pragma once

#include <cstdint>
#include <vector>

#include "elements.h"
#include "signal.h"
#include "tensor_reduction.h"

namespace hvdlite {

// Each rank has two places in shared memory, and a count of the allreduces whose tensors it has put there. It packs all
// of its tensors, counts, waits until all ranks have counted as far, and reduces what all of them have packed into its
// own tensors.
//
// The places take turns. Whoever packs into one has seen all counts of the allreduce before; a rank counted there when
// it had read what lay in this place before that. So nobody waits a second time.
//
// A count is stored with release order after what was packed, and loaded with acquire order before that is read. Counts
// on which somebody sleeps are Dekker's pattern: the sleeper says so, then looks at the count; the rank stores the
// count, then looks for sleepers; all sequentially consistent, but for the end of a sleep (`futex_wait`).
class SmallAllreduce {
 public:
  static constexpr std::uint64_t kMostBytes = 8 << 10;

  // `address`: of `bytes_needed(size)` zeroed bytes, a multiple of 64; or counts of all ranks that are alike, from
  // which it goes on. `abort_address`: ends every wait.
  SmallAllreduce(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us);

  static std::size_t bytes_needed(int size);

  static bool takes(std::uint64_t numel, DType wire_dtype) { return numel * item_bytes(wire_dtype) <= kMostBytes; }

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
  WaitStatus finish(const TensorReduction& job, double timeout_s);
  WaitStatus await_all(Clock::time_point until);

  std::uintptr_t address_;
  Word* abort_;
  std::chrono::microseconds spin_;
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint32_t turn_ = 0;  // counts; may wrap
  bool has_begun_ = false;
};

}  // namespace hvdlite
