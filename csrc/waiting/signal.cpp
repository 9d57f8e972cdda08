#include "waiting/signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <stdexcept>

#include "kernels/reduce.h"
#include "kernels/shard.h"
#include "waiting/spin.h"

namespace hvdlite {
namespace {

// From any count of rings that is soon to come: what was followed long ago is nothing that a count reaches when it
// wraps.
constexpr std::uint32_t kFarAway = 1u << 31;

constexpr std::uint32_t kInVain = 4;  // before the owner naps
// What a ring that nobody follows may have to wait for, the first time; each nap is twice as long as the one before.
constexpr std::chrono::microseconds kFirstNap{100}, kLastNap{1600};

void nap(std::chrono::microseconds duration) {
  const timespec time{0, static_cast<long>(std::chrono::nanoseconds(duration).count())};
  nanosleep(&time, nullptr);
}

}  // namespace

Clock::time_point time_after(double seconds) {
  constexpr double kLongest = 1e9;  // keeps the sum far from the end of the clock's range
  const double bounded = seconds > 0 ? std::min(seconds, kLongest) : 0.0;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

bool futex_wait(Word& word, std::uint32_t expected, Clock::time_point until) {
  // FUTEX_WAIT_BITSET takes a point in time of CLOCK_MONOTONIC, which is what steady_clock reads on Linux.
  const auto point = nanoseconds_of(until);
  if (until <= Clock::now()) return false;
  timespec absolute{};
  absolute.tv_sec = static_cast<time_t>(point / 1'000'000'000);
  absolute.tv_nsec = static_cast<long>(point % 1'000'000'000);
  constexpr auto kAny = FUTEX_BITSET_MATCH_ANY;
  return syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &absolute, nullptr, kAny) != 0 && errno == EINTR;
}

void futex_wake_all(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Ringing and going to sleep are Dekker's pattern: each side writes its word, then reads the other's. In
// sequentially consistent order at least one sees the other, so no ring is missed. The beginning and the end of an
// assistance are two more: a ring that took the assistant for absent has been counted before the assistant looks for
// the last time (`assist_until`); one that took it for present, before `end_assistance` looks. The count
// is released by every ring and acquired by every look, so that what was written before a ring is seen by whoever has
// heard it.
void Doorbell::ring() {
  count.fetch_add(1, std::memory_order_seq_cst);
  if (assistants.load(std::memory_order_seq_cst) != 0) {
    stir();
  } else if (sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(count);
  }
}

void Doorbell::stir() {
  if (assistants_asleep.load(std::memory_order_seq_cst) == 0) return;
  stirs.fetch_add(1, std::memory_order_release);
  futex_wake_all(stirs);
}

std::uint32_t Doorbell::wait_once(std::uint32_t seen, Clock::time_point until) {
  look_back(seen);
  auto next_nap = kFirstNap;
  do {
    std::uint32_t now = count.load(std::memory_order_acquire);
    if (now != seen && naps() && !is_followed(now)) {
      nap(kFirstNap);  // who has rung may be about to follow
      now = count.load(std::memory_order_acquire);
    }
    if (now != seen) {
      if (!is_followed(now)) {
        followed.store(now + kFarAway, std::memory_order_relaxed);
        return now;
      }
      look_back(seen = now);
      next_nap = kFirstNap;
    }
    if (!naps() || next_nap > kLastNap) {
      sleep_once(seen, until);
      if (count.load(std::memory_order_acquire) == seen) break;
    } else {
      nap(next_nap);
      next_nap *= 2;
    }
  } while (Clock::now() < until);
  return count.load(std::memory_order_acquire);
}

bool Doorbell::naps() const { return in_vain.load(std::memory_order_relaxed) >= kInVain; }

// An assistant that is there looks, before it leaves, at all rings that have been counted by then; of one that has left
// `followed` was stored before. Either is seen here in the order in which it was stored. Where the owner overwrites
// what an assistant has just stored, it wakes up once more than it has to.
bool Doorbell::is_followed(std::uint32_t rings) const {
  return assistants.load(std::memory_order_seq_cst) != 0 || followed.load(std::memory_order_seq_cst) == rings;
}

// After the owner has followed `seen` rings, or found that somebody else does.
void Doorbell::look_back(std::uint32_t seen) {
  if (seen == looked_at.load(std::memory_order_relaxed)) return;
  looked_at.store(seen, std::memory_order_relaxed);
  in_vain.store(is_followed(seen) ? in_vain.load(std::memory_order_relaxed) + 1 : 0, std::memory_order_relaxed);
}

void Doorbell::sleep_once(std::uint32_t seen, Clock::time_point until) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(count, seen, until);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Doorbell::begin_assistance() { assistants.store(1, std::memory_order_seq_cst); }

std::uint32_t Doorbell::assist_once(std::uint32_t seen, Clock::time_point until, std::chrono::microseconds spin) {
  const auto rung = [&] { return count.load(std::memory_order_seq_cst) != seen; };
  if (!spin_until(std::min(Clock::now() + spin, until), rung)) assist_until(rung, until, [&] { return until; });
  return count.load(std::memory_order_acquire);
}

std::uint32_t Doorbell::end_assistance(std::uint32_t heard) {
  followed.store(heard, std::memory_order_seq_cst);
  assistants.store(0, std::memory_order_seq_cst);
  return count.load(std::memory_order_seq_cst);
}

// `generation` comes first: wake_all(address of the barrier) makes every sleeper look at its abort word.
struct Barrier::Shared {
  alignas(kCacheLine) Word generation;  // counts openings; everybody spins and sleeps on it
  Word sleepers;
  Word left;  // not zero once a rank has left
  alignas(kCacheLine) Word arrived;
  struct Epoch {
    alignas(kCacheLine) Word value;
  };
  Epoch epochs[1];  // `size` of them
};

Barrier::Barrier(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us)
    : shared_(reinterpret_cast<Shared*>(address)),
      abort_(reinterpret_cast<Word*>(abort_address)),
      spin_(std::max(spin_us, 0)),
      rank_(static_cast<std::uint32_t>(rank)),
      size_(static_cast<std::uint32_t>(size)) {
  if (size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("Barrier: rank must be in [0, size)");
  if (address == 0 || address % kCacheLine != 0) {
    throw std::invalid_argument("Barrier: address must be a multiple of 64");
  }
  if (abort_address == 0 || abort_address % sizeof(Word) != 0) {
    throw std::invalid_argument("Barrier: abort_address must be a multiple of 4");
  }
}

std::size_t Barrier::bytes_needed(int size) {
  if (size < 1) throw std::invalid_argument("Barrier: size must be at least 1");
  return sizeof(Shared) + sizeof(Shared::Epoch) * static_cast<std::size_t>(size - 1);
}

// What any rank has written before it arrives, all see after the opening: arrivals are read-modify-writes of one word
// that acquire and release, so the last one has acquired all others; it releases the generation, which the others
// acquire. The generation can be loaded relaxed before: this rank has seen the last opening, having waited for it, and
// without its arrival there is no other. Epochs are relaxed: each is stored before the arrival, so whoever has seen the
// opening sees them all; before that they only say who is late, and nothing is read because of them.
WaitStatus Barrier::wait(double timeout_s) {
  if (is_aborted(*abort_)) return WaitStatus::kAborted;
  const std::uint32_t before = shared_->generation.load(std::memory_order_relaxed);
  Word& epoch = shared_->epochs[rank_].value;
  epoch.store(epoch.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);  // no other rank writes it
  if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    shared_->arrived.store(0, std::memory_order_relaxed);  // published by the new generation
    // Before the sleepers are loaded, in Dekker's pattern (`futex_wait`).
    shared_->generation.store(before + 1, std::memory_order_seq_cst);
    if (shared_->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(shared_->generation);
    return WaitStatus::kOk;
  }
  return await_generation_after(before, time_after(timeout_s));
}

WaitStatus Barrier::await_generation_after(std::uint32_t before, Clock::time_point until) {
  const auto opened = [&] { return shared_->generation.load(std::memory_order_acquire) != before; };
  if (spin_until(std::min(Clock::now() + spin_, until), opened)) return WaitStatus::kOk;

  shared_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  WaitStatus status = WaitStatus::kOk;
  while (!opened()) {
    const auto now = Clock::now();
    if (is_aborted(*abort_)) {
      status = WaitStatus::kAborted;
      break;
    }
    // Who left had seen the opening that it waited for, and released that: it is looked for again.
    if (shared_->left.load(std::memory_order_acquire) != 0) {
      status = opened() ? WaitStatus::kOk : WaitStatus::kLeft;
      break;
    }
    if (now >= until) {
      status = WaitStatus::kTimeout;
      break;
    }
    futex_wait(shared_->generation, before, std::min(until, now + kAbortLook));
  }
  shared_->sleepers.fetch_sub(1, std::memory_order_relaxed);
  return status;
}

std::vector<int> Barrier::late() const {
  const std::uint32_t mine = shared_->epochs[rank_].value.load(std::memory_order_relaxed);
  std::vector<int> ranks;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    const std::uint32_t theirs = shared_->epochs[rank].value.load(std::memory_order_relaxed);
    if (static_cast<std::int32_t>(theirs - mine) < 0) ranks.push_back(static_cast<int>(rank));  // epochs may wrap
  }
  return ranks;
}

// Who has looked at `left` just before sleeps no longer than `kAbortLook`.
void Barrier::leave() {
  shared_->left.store(1, std::memory_order_release);
  futex_wake_all(shared_->generation);
}

WaitStatus Barrier::allreduce(const std::vector<std::uintptr_t>& copies, std::uint64_t numel, DType dtype, Op op,
                              double prescale, double postscale, double timeout_s) {
  // Before anybody waits: a rank that raised between the barriers would leave the others at the second one.
  if (copies.size() != size_) throw std::invalid_argument("Barrier.allreduce: one copy per rank is needed");
  const Reducer reducer(dtype, op, prescale, postscale);
  const Bounds shard = shard_bounds(numel, size_, rank_, dtype);

  const WaitStatus filled = wait(timeout_s);
  if (filled != WaitStatus::kOk) return filled;
  reducer.reduce(copies, copies, shard.begin, shard.end);
  return wait(timeout_s);
}

}  // namespace hvdlite
