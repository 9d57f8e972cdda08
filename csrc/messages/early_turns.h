// How far the ranks of a node are with allreduces between nodes, which one of them, rank 0, exchanges for all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "waiting/signal.h"

namespace hvdlite {

// In each turn every rank puts its tensors into its own place of shared memory and `begin`s; rank 0 waits until
// `all_have_begun`, reduces what lies in all places, exchanges that with other nodes, puts the result into all places
// and says that it `has_come`. Then every rank reads its own place, and is free to write there for the next turn.
//
// So a place is written by its rank before `begin`, which releases; by rank 0 after `all_have_begun`, which acquires,
// and before `bring`, which releases; and read by its rank after `has_come`, which acquires. Nothing else is ordered.
// Sleepers there are none: who waits looks again.
class EarlyTurns {
 public:
  // `address`: of `bytes_needed(size)` zeroed bytes, a multiple of 64.
  EarlyTurns(std::uintptr_t address, int rank, int size);

  static std::size_t bytes_needed(int size);

  // This rank has, and this is its next turn, of which the others speak.
  void begin() { word(rank_).store(++turn_, std::memory_order_release); }
  bool all_have_begun() const;
  // The result, by rank 0.
  void bring() { word(size_).store(turn_, std::memory_order_release); }
  bool has_come() const { return word(size_).load(std::memory_order_acquire) >= turn_; }

 private:
  // A line each: those of the ranks, then that of the result.
  std::atomic<std::uint64_t>& word(std::uint32_t index) const {
    return atomic_at<std::uint64_t>(address_ + kCacheLine * index);
  }

  std::uintptr_t address_;
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint64_t turn_ = 0;  // they count from 1
};

}  // namespace hvdlite
