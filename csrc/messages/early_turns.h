// How far the ranks of a node are with allreduces between nodes, which one of them, rank 0, exchanges for all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "node/ready_counts.h"
#include "waiting/signal.h"

namespace hvdlite {

// In each turn every rank puts its tensors into its own place of shared memory and `begin`s; rank 0 waits until
// `all_have_begun`, reduces what lies in all places, exchanges that with other nodes, puts the result into all places
// and says that it `has_come`. Then every rank reads its own place, and is free to write there for the next turn.
//
// So a place is written by its rank before `begin`, which releases; by rank 0 after `all_have_begun`, which acquires,
// and before `bring`, which releases; and read by its rank after `has_come`, which acquires.
//
// Whoever may have completed what others sleep for (`ReadyCounts::sleep_until`) stirs them. Two ranks that begin at the
// same time, and then look at all: at least one of them sees that all have. This is Dekker's pattern, as is that
// between who stores and who goes to sleep, so all words are stored and loaded in sequentially consistent order.
class EarlyTurns {
 public:
  // `counts`: of the ranks of the node, and has to live as long. `address`: of `bytes_needed` zeroed bytes, a multiple
  // of 64.
  EarlyTurns(const ReadyCounts& counts, std::uintptr_t address);

  static std::size_t bytes_needed(int size);

  // This rank has, and this is its next turn, of which the others speak.
  void begin();
  bool all_have_begun() const;
  // The result, by rank 0.
  void bring();
  bool has_come() const { return word(counts_.size()).load(std::memory_order_seq_cst) >= turn_; }

 private:
  // A line each: those of the ranks, then that of the result.
  std::atomic<std::uint64_t>& word(std::uint32_t index) const {
    return atomic_at<std::uint64_t>(address_ + kCacheLine * index);
  }

  const ReadyCounts& counts_;
  std::uintptr_t address_;
  std::uint64_t turn_ = 0;  // they count from 1
};

}  // namespace hvdlite
