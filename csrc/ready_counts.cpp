#include "ready_counts.h"

#include <algorithm>
#include <stdexcept>

#include "spin.h"

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
  Word wants_ring;
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

Doorbell& ReadyCounts::doorbell(std::uint32_t rank) const {
  return *reinterpret_cast<Doorbell*>(doorbells_ + kCacheLine * rank);
}

void ReadyCounts::set(std::uint64_t plan, std::uint64_t count) {
  std::atomic<std::uint64_t>& own = line(rank_).count;
  const std::uint64_t before = count_of(own.load(std::memory_order_relaxed), plan);
  own.store(tag_of(plan) | count, std::memory_order_seq_cst);
  if (all(plan) <= before) return;  // as before: somebody else is behind
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && line(rank).wants_ring.load(std::memory_order_seq_cst) != 0) doorbell(rank).ring();
  }
}

std::uint64_t ReadyCounts::all(std::uint64_t plan) const {
  std::uint64_t least = kCountMask;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    least = std::min(least, count_of(line(rank).count.load(std::memory_order_seq_cst), plan));
  }
  return least;
}

void ReadyCounts::want_ring(bool wanted) {
  Word& own = line(rank_).wants_ring;
  if ((own.load(std::memory_order_relaxed) != 0) != wanted) own.store(wanted ? 1 : 0, std::memory_order_seq_cst);
}

bool ReadyCounts::has_news(std::uint32_t heard) const {
  return doorbell(rank_).count.load(std::memory_order_acquire) != heard;
}

ReadyCounts::Outcome ReadyCounts::await(std::uint64_t plan, std::uint64_t count, std::uint32_t heard,
                                        Clock::time_point until, std::chrono::microseconds spin) {
  const auto all_ready = [&] { return all(plan) >= count; };
  Doorbell& own = doorbell(rank_);
  spin_until(std::min(Clock::now() + spin, until), [&] { return all_ready() || has_news(heard); });
  if (all_ready()) return Outcome::kAllReady;
  want_ring(true);
  if (all_ready()) return Outcome::kAllReady;
  if (!has_news(heard)) {
    own.begin_assistance();
    own.assist_once(heard, until, std::chrono::microseconds(0));
    const bool is_ready = all_ready();
    const bool is_rung = own.end_assistance() != heard;
    if (is_ready) return is_rung ? Outcome::kAllReadyAndRung : Outcome::kAllReady;
    if (is_rung) own.ring();  // which the thread that usually sleeps has not heard
  }
  return Outcome::kNotYet;
}

}  // namespace hvdlite
