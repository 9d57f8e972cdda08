// How processes of one node signal each other through shared memory: atomics, a doorbell, a barrier.
//
// Waiters sleep on futexes. All of them are shared (no FUTEX_PRIVATE_FLAG), since the same memory is mapped at
// different addresses in different processes. Nobody makes a system call to wake a word on which nobody sleeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/elements.h"

namespace hvdlite {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<std::uint32_t>;

// As Python's time.monotonic_ns counts.
inline std::int64_t nanoseconds_of(Clock::time_point point) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(point.time_since_epoch()).count();
}

// A waiter that sleeps looks at its abort word this often, should the wake-up that belongs to an abort not come.
constexpr std::chrono::milliseconds kAbortLook{100};

// Whether `abort` is set, which ends every wait for good. Acquired: whoever is aborted sees what was written before the
// word was set. No more order is needed: a sleeper who just missed it, and the wake-up too, looks again.
inline bool is_aborted(const Word& abort) { return abort.load(std::memory_order_acquire) != 0; }

// A word of shared memory by its address, a multiple of its size.
template <class T>
std::atomic<T>& atomic_at(std::uintptr_t address) {
  static_assert(std::atomic<T>::is_always_lock_free, "shared memory needs atomics without locks");
  return *reinterpret_cast<std::atomic<T>*>(address);
}

// Sequentially consistent: of two ranks that each store and then look at the other's word, at least one sees what the
// other has stored.
template <class T>
T load(std::uintptr_t address) {
  return atomic_at<T>(address).load(std::memory_order_seq_cst);
}

template <class T>
void store(std::uintptr_t address, T value) {
  atomic_at<T>(address).store(value, std::memory_order_seq_cst);
}

// `seconds` from now; anything that is no sensible duration (NaN, negative) counts as 0, and at most 30 years.
Clock::time_point time_after(double seconds);

// Sleeps while `word` holds `expected`, until `until`, or a signal, or any wake-up; may return for no reason.
// The kernel looks at `word` after a full barrier. So who adds itself to a word of sleepers, in whatever memory order,
// and then sleeps is one side of Dekker's pattern; the other one stores `word` and then loads the sleepers, both
// sequentially consistent. Loads of `word` in between save a system call, and no more depends on them. Who leaves the
// sleepers may do so relaxed: one who still sees it makes a system call too many.
// Returns whether it was a signal that has ended the sleep.
bool futex_wait(Word& word, std::uint32_t expected, Clock::time_point until);
void futex_wake_all(Word& word);

// A count of rings, and who sleeps on it. Zeroed memory is a valid doorbell.
//
// It has an owner, a thread that sleeps on it for as long as there is nothing to do, and perhaps an assistant: another
// thread of the process that does the owner's work for a while. Rings wake the assistant while there is one, and the
// owner sleeps on. An assistant that waits for something in shared memory is stirred by whoever stores that; it is no
// ring, as the assistant alone has to know.
//
// Who submits and waits at once rings, and becomes the assistant a moment later: an owner that wakes up for that is
// only in the way. So where rings are followed by assistants time and again, the owner naps while more may come, and
// rings wake nobody; it looks now and then whether there is one that nobody follows.
struct Doorbell {
  Word count;
  Word sleepers;    // owners that sleep, or are about to
  Word assistants;  // 1 while there is one
  Word assistants_asleep;
  Word followed;   // rings that the last assistant had followed when it left
  Word looked_at;  // rings that the owner had followed, or found followed, when it looked last; nobody else looks here
  Word in_vain;    // how many times in a row all of them were followed by an assistant; likewise
  Word stirs;      // on which an assistant sleeps: one for each ring and each stir that may have found it asleep

  void ring();
  // After a sequentially consistent store of what an assistant may sleep for.
  void stir();
  // Sleeps until there is a ring after `seen` that no assistant follows, or `until` has come; a signal or a stray
  // wake-up ends it early. Returns the count.
  std::uint32_t wait_once(std::uint32_t seen, Clock::time_point until);
  // By the assistant, before it looks whether there is something to do.
  void begin_assistance();
  // One sleep of the assistant, as `wait_once`, which looks for `spin` before it sleeps.
  std::uint32_t assist_once(std::uint32_t seen, Clock::time_point until, std::chrono::microseconds spin);
  // The assistant sleeps until `happened`, a signal, or `until`, and looks at least once. It is to look when it is rung
  // or stirred, by sequentially consistent loads, and when it is `next_look()`.
  template <class Condition, class NextLook>
  void assist_until(Condition happened, Clock::time_point until, NextLook next_look);
  // Ends what `begin_assistance` began; the assistant has followed `heard` rings. Returns the count: rings up to then
  // may have woken nobody but the assistant, which rings once more if there are others.
  std::uint32_t end_assistance(std::uint32_t heard);

 private:
  bool is_followed(std::uint32_t rings) const;
  bool naps() const;
  void look_back(std::uint32_t seen);
  void sleep_once(std::uint32_t seen, Clock::time_point until);
};
static_assert(sizeof(Doorbell) == 32, "the doorbell's size is part of the Python interface");

// Dekker's pattern: who stirs has stored what is looked at here, then loads the sleepers; all sequentially consistent.
// So either it sees this one, or its store is seen. If it sees this one, `stirs` grows, by a read-modify-write that
// releases: if that is acquired here, what was stored is seen; if not, the kernel finds another value than `before`, or
// the wake-up finds this thread asleep. Who leaves may do so relaxed (`futex_wait`).
template <class Condition, class NextLook>
void Doorbell::assist_until(Condition happened, Clock::time_point until, NextLook next_look) {
  assistants_asleep.fetch_add(1, std::memory_order_seq_cst);
  bool is_interrupted = false;
  while (true) {
    const std::uint32_t before = stirs.load(std::memory_order_acquire);
    if (happened() || is_interrupted || Clock::now() >= until) break;
    is_interrupted = futex_wait(stirs, before, std::min(until, next_look()));
  }
  assistants_asleep.fetch_sub(1, std::memory_order_relaxed);
}

enum class WaitStatus : int { kOk = 0, kTimeout = 1, kAborted = 2, kLeft = 3 };

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
  // This rank comes no more, so that no later wait can end in order; by any of its threads.
  void leave();
  WaitStatus allreduce(const std::vector<std::uintptr_t>& copies, std::uint64_t numel, DType dtype, Op op,
                       double prescale, double postscale, double timeout_s);

 private:
  struct Shared;

  WaitStatus await_generation_after(std::uint32_t before, Clock::time_point until);

  Shared* shared_;
  Word* abort_;
  std::chrono::microseconds spin_;
  std::uint32_t rank_;
  std::uint32_t size_;
};

}  // namespace hvdlite
