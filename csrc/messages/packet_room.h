// How much room ranks make in their packets beside the numbers (hvdlite/memory/packets.py): enough for what they gave.
#pragma once

#include <atomic>
#include <cstdint>

namespace hvdlite {

// Of one operation. It is the same on all ranks, as each notes every time that all have done it, and nothing else.
class PacketRoom {
 public:
  // In bytes, a power of two, as there are packets for each; 0: it is not known, or no longer.
  std::uint64_t now() const { return room_.load(std::memory_order_relaxed); }
  static std::uint64_t enough_for(std::uint64_t bytes);

  // The rank that gave most gave so many bytes. Room grows at once, and shrinks where less was enough several times in
  // a row: amounts that take turns are no reason to make other packets each time.
  void note(std::uint64_t bytes);
  void forget() { room_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> room_{0};  // who is not at work may look at it, too
  int smaller_ = 0;
};

}  // namespace hvdlite
