#include "messages/early_turns.h"

#include <stdexcept>

namespace hvdlite {

EarlyTurns::EarlyTurns(const ReadyCounts& counts, std::uintptr_t address) : counts_(counts), address_(address) {
  if (address == 0 || address % kCacheLine != 0) {
    throw std::invalid_argument("EarlyTurns: address must be a multiple of 64");
  }
}

std::size_t EarlyTurns::bytes_needed(int size) { return kCacheLine * static_cast<std::size_t>(size + 1); }

void EarlyTurns::begin() {
  word(counts_.rank()).store(++turn_, std::memory_order_seq_cst);
  if (counts_.rank() != 0 && all_have_begun()) counts_.stir(0);
}

void EarlyTurns::bring() {
  word(counts_.size()).store(turn_, std::memory_order_seq_cst);
  for (std::uint32_t rank = 1; rank < counts_.size(); ++rank) counts_.stir(rank);
}

bool EarlyTurns::all_have_begun() const {
  for (std::uint32_t rank = 0; rank < counts_.size(); ++rank) {
    if (word(rank).load(std::memory_order_seq_cst) < turn_) return false;
  }
  return true;
}

}  // namespace hvdlite
