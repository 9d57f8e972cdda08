#include "messages/early_turns.h"

#include <stdexcept>

namespace hvdlite {

EarlyTurns::EarlyTurns(std::uintptr_t address, int rank, int size)
    : address_(address), rank_(static_cast<std::uint32_t>(rank)), size_(static_cast<std::uint32_t>(size)) {
  if (size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("EarlyTurns: rank must be in [0, size)");
  if (address == 0 || address % kCacheLine != 0) {
    throw std::invalid_argument("EarlyTurns: address must be a multiple of 64");
  }
}

std::size_t EarlyTurns::bytes_needed(int size) { return kCacheLine * static_cast<std::size_t>(size + 1); }

bool EarlyTurns::all_have_begun() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (word(rank).load(std::memory_order_acquire) < turn_) return false;
  }
  return true;
}

}  // namespace hvdlite
