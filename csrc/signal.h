// How processes of one node signal each other through shared memory: atomics, a doorbell, a barrier.
//
// Waiters sleep on futexes. All of them are shared (no FUTEX_PRIVATE_FLAG), since the same memory is mapped at
// different addresses in different processes. Nobody makes a system call to wake a word on which nobody sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "elements.h"

namespace hvdlite {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<std::uint32_t>;

// `seconds` from now; anything that is no sensible duration (NaN, negative) counts as 0, and at most 30 years.
Clock::time_point time_after(double seconds);

// Sleeps while `word` holds `expected`, until `until`, or a signal, or any wake-up; may return for no reason.
void futex_wait(Word& word, std::uint32_t expected, Clock::time_point until);
void futex_wake_all(Word& word);

// A count of rings, and how many threads sleep on it. Zeroed memory is a valid doorbell.
struct Doorbell {
  Word count;
  Word sleepers;

  void ring();
  // One sleep, until the count differs from `seen` or `until` has come; a signal or a stray wake-up ends it early.
  // Returns the count.
  std::uint32_t wait_once(std::uint32_t seen, Clock::time_point until);
};
static_assert(sizeof(Doorbell) == 8, "the doorbell's size is part of the Python interface");

enum class WaitStatus : int { kOk = 0, kTimeout = 1, kAborted = 2 };

// A central barrier: arrivals are counted, the last one opens it. Each rank also keeps its own epoch in a cache
// line of its own, which the others read only to say who is late.
class Barrier {
 public:
  Barrier(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us);

  static std::size_t bytes_needed(int size);

  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const { return size_; }

  WaitStatus wait(double timeout_s);
  std::vector<int> late() const;
  WaitStatus allreduce(const std::vector<std::uintptr_t>& copies, std::uint64_t numel, DType dtype, Op op,
                       double prescale, double postscale, double timeout_s);

 private:
  struct Shared;

  bool aborted() const { return abort_->load(std::memory_order_acquire) != 0; }
  WaitStatus await_generation_after(std::uint32_t before, Clock::time_point until);

  Shared* shared_;
  Word* abort_;
  std::chrono::microseconds spin_;
  std::uint32_t rank_;
  std::uint32_t size_;
};

}  // namespace hvdlite
