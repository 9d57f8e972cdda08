#include "node/places_in_turn.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/elements.h"
#include "waiting/spin.h"

namespace hvdlite {
namespace {

constexpr std::uint32_t kSets = 2;

}  // namespace

struct PlacesInTurn::Line {
  alignas(kCacheLine) Word turn;  // futex
  Word sleepers;                  // of other ranks, on `turn`
};

PlacesInTurn::PlacesInTurn(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us)
    : address_(address),
      abort_(reinterpret_cast<Word*>(abort_address)),
      spin_(std::max(spin_us, 0)),
      rank_(static_cast<std::uint32_t>(rank)),
      size_(static_cast<std::uint32_t>(size)),
      most_bytes_(most_bytes(size)) {
  if (size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("PlacesInTurn: rank must be in [0, size)");
  if (address == 0 || address % kCacheLine != 0) {
    throw std::invalid_argument("PlacesInTurn: address must be a multiple of 64");
  }
  // Relaxed: no other rank writes it, and what has last done so for this rank was over before this was built.
  turn_ = line(rank_).turn.load(std::memory_order_relaxed);
}

std::size_t PlacesInTurn::bytes_needed(int size) {
  return static_cast<std::size_t>(size) * (sizeof(Line) + kSets * most_bytes(size));
}

PlacesInTurn::Line& PlacesInTurn::line(std::uint32_t rank) const {
  return *reinterpret_cast<Line*>(address_ + rank * sizeof(Line));
}

std::uintptr_t PlacesInTurn::place(std::uint32_t rank) const {
  const std::uint32_t in_set = (rank + turn_ / kSets) % size_;
  return address_ + size_ * sizeof(Line) + (turn_ % kSets * size_ + in_set) * most_bytes_;
}

bool PlacesInTurn::has_come(std::uint32_t rank) const {
  const std::uint32_t theirs = line(rank).turn.load(std::memory_order_seq_cst);
  return static_cast<std::int32_t>(theirs - turn_) >= 0;  // counts may wrap
}

void PlacesInTurn::begin() {
  ++turn_;
  has_begun_ = true;
}

void PlacesInTurn::publish() {
  Line& own = line(rank_);
  own.turn.store(turn_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.turn);
}

// Counts that were stored for what is withdrawn are one above those of ranks that have not begun. So all go on at two
// above, where nobody has been.
void PlacesInTurn::withdraw() {
  turn_ += has_begun_ ? 1 : 2;
  has_begun_ = false;
}

bool PlacesInTurn::all_have_begun() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!has_come(rank)) return false;
  }
  return true;
}

WaitStatus PlacesInTurn::await_all(double timeout_s) {
  return all_have_begun() ? WaitStatus::kOk : sleep_until_all(time_after(timeout_s));
}

WaitStatus PlacesInTurn::sleep_until_all(Clock::time_point until) {
  if (is_aborted(*abort_)) return WaitStatus::kAborted;
  if (spin_until(std::min(Clock::now() + spin_, until), [&] { return all_have_begun(); })) return WaitStatus::kOk;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    Line& its = line(rank);
    its.sleepers.fetch_add(1, std::memory_order_seq_cst);
    WaitStatus status = WaitStatus::kOk;
    while (!has_come(rank)) {
      const std::uint32_t theirs = its.turn.load(std::memory_order_seq_cst);
      const auto now = Clock::now();
      if (is_aborted(*abort_)) {
        status = WaitStatus::kAborted;
      } else if (now >= until) {
        status = WaitStatus::kTimeout;
      }
      if (status != WaitStatus::kOk) break;
      if (!has_come(rank)) futex_wait(its.turn, theirs, std::min(until, now + kAbortLook));
    }
    its.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (status != WaitStatus::kOk) return status;
  }
  return WaitStatus::kOk;
}

std::vector<int> PlacesInTurn::late() const {
  std::vector<int> ranks;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!has_come(rank)) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void PlacesInTurn::wake_all() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) futex_wake_all(line(rank).turn);
}

}  // namespace hvdlite
