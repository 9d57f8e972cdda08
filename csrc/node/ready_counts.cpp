#include "node/ready_counts.h"

#include <algorithm>
#include <stdexcept>

#include "waiting/spin.h"

namespace hvdlite {
namespace {

constexpr int kCountBits = 44;
constexpr std::uint64_t kCountMask = (std::uint64_t{1} << kCountBits) - 1;

// Plans are compared modulo 2^20: a rank is never behind by as many.
std::uint64_t tag_of(std::uint64_t plan) { return plan << kCountBits; }

std::uint64_t count_of(std::uint64_t word, std::uint64_t plan) {
  return (word & ~kCountMask) == tag_of(plan) ? word & kCountMask : 0;
}

}  // namespace

struct ReadyCounts::Line {
  alignas(kCacheLine) std::atomic<std::uint64_t> count;
  std::atomic<std::uint64_t> wish;      // a plan, and what is wanted instead
  std::atomic<std::uint64_t> decision;  // that of rank 0: of the last plan that it was made for, and what it was
  Word wants;                           // a Want
};

ReadyCounts::ReadyCounts(std::uintptr_t address, std::uintptr_t doorbells, int rank, int size)
    : address_(address),
      doorbells_(doorbells),
      rank_(static_cast<std::uint32_t>(rank)),
      size_(static_cast<std::uint32_t>(size)) {
  static_assert(sizeof(Line) == kCacheLine, "the line's size is part of the Python interface");
  if (size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("ReadyCounts: rank must be in [0, size)");
}

ReadyCounts::Line& ReadyCounts::line(std::uint32_t rank) const {
  return *reinterpret_cast<Line*>(address_ + kCacheLine * rank);
}

void ReadyCounts::set(std::uint64_t plan, std::uint64_t count) {
  std::atomic<std::uint64_t>& own = line(rank_).count;
  const std::uint64_t before = count_of(own.load(std::memory_order_relaxed), plan);
  own.store(tag_of(plan) | count, std::memory_order_seq_cst);
  if (all(plan) > before) tell_who_wants();  // else it is as before: somebody else is behind
}

void ReadyCounts::tell_who_wants() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const std::uint32_t wanted = line(rank).wants.load(std::memory_order_seq_cst);
    if (wanted == kRing) doorbell(rank).ring();
    if (wanted == kStir) doorbell(rank).stir();
  }
}

std::uint64_t ReadyCounts::all(std::uint64_t plan) const {
  std::uint64_t least = kCountMask;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    least = std::min(least, count_of(line(rank).count.load(std::memory_order_seq_cst), plan));
  }
  return least;
}

void ReadyCounts::want_ring(bool wanted) { want(wanted ? kRing : kNothing); }

void ReadyCounts::want(Want wanted) {
  Word& own = line(rank_).wants;
  if (own.load(std::memory_order_relaxed) != wanted) own.store(wanted, std::memory_order_seq_cst);
}

// Sequentially consistent for who goes to sleep (`Doorbell::assist_until`).
bool ReadyCounts::has_news(std::uint32_t heard) const {
  return doorbell(rank_).count.load(std::memory_order_seq_cst) != heard;
}

ReadyCounts::Outcome ReadyCounts::await(std::uint64_t plan, std::uint64_t count, std::uint32_t heard,
                                        Clock::time_point until, std::chrono::microseconds spin) {
  return await_that([&] { return all(plan) >= count; }, heard, until, spin);
}

template <class Condition>
ReadyCounts::Outcome ReadyCounts::await_that(Condition holds, std::uint32_t heard, Clock::time_point until,
                                             std::chrono::microseconds spin) {
  Doorbell& own = doorbell(rank_);
  const auto holds_or_news = [&] { return holds() || has_news(heard); };
  spin_until(std::min(Clock::now() + spin, until), holds_or_news);
  if (holds()) return Outcome::kAllReady;
  const bool sleeps = !has_news(heard);
  if (sleeps) {
    want(kStir);
    own.begin_assistance();
    own.assist_until(holds_or_news, until, [&] { return until; });
  }
  bool is_ready = holds();
  if (!is_ready) {
    want(kRing);
    is_ready = holds();
  }
  const bool is_rung = sleeps && own.end_assistance(heard) != heard;
  if (is_ready) return is_rung ? Outcome::kAllReadyAndRung : Outcome::kAllReady;
  if (is_rung) own.ring();  // which the thread that usually sleeps has not heard
  return Outcome::kNotYet;
}

bool ReadyCounts::agree(std::uint64_t plan, std::uint64_t next, std::uint32_t heard, Clock::time_point until,
                        std::chrono::microseconds spin) {
  const std::uint64_t wish = plan << kNextBits | next;
  line(rank_).wish.store(wish, std::memory_order_seq_cst);
  if (all_want(wish)) tell_who_wants();
  const auto is_settled = [&] { return is_decided(plan) || all_want(wish) || somebody_differs(plan, wish); };
  if (await_that(is_settled, heard, until, spin) == Outcome::kAllReadyAndRung) doorbell(rank_).ring();
  want(kRing);  // for what is told from here on
  const bool has_ended = decide(plan, all_want(wish));
  if (!has_ended) tell_who_wants();  // in vain
  return has_ended;
}

bool ReadyCounts::all_want(std::uint64_t wish) const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (line(rank).wish.load(std::memory_order_seq_cst) != wish) return false;
  }
  return true;
}

bool ReadyCounts::somebody_differs(std::uint64_t plan, std::uint64_t wish) const {
  const std::uint64_t done = count_of(line(rank_).count.load(std::memory_order_relaxed), plan);
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    const std::uint64_t other = line(rank).wish.load(std::memory_order_seq_cst);
    if (other >> kNextBits == wish >> kNextBits && other != wish) return true;  // of this plan, whose high bits are cut
    if (count_of(line(rank).count.load(std::memory_order_seq_cst), plan) > done) return true;
  }
  return false;
}

// Decisions grow: 2 * plan, or one more where all want the same. One for a later plan says that there is a later one,
// so that this has ended: nobody else decides, or comes to the next, while this rank has not done so.
bool ReadyCounts::is_decided(std::uint64_t plan) const {
  return line(0).decision.load(std::memory_order_seq_cst) >= 2 * plan;
}

bool ReadyCounts::decide(std::uint64_t plan, bool has_ended) {
  std::atomic<std::uint64_t>& decision = line(0).decision;
  std::uint64_t found = decision.load(std::memory_order_seq_cst);
  while (found < 2 * plan) {
    if (decision.compare_exchange_weak(found, 2 * plan + (has_ended ? 1 : 0), std::memory_order_seq_cst)) {
      return has_ended;
    }
  }
  return found != 2 * plan;
}

}  // namespace hvdlite
