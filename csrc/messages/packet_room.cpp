#include "messages/packet_room.h"

namespace hvdlite {
namespace {

constexpr std::uint64_t kLeast = 64;
constexpr int kInARow = 8;

}  // namespace

std::uint64_t PacketRoom::enough_for(std::uint64_t bytes) {
  std::uint64_t room = kLeast;
  while (room < bytes) room *= 2;
  return room;
}

void PacketRoom::note(std::uint64_t bytes) {
  const std::uint64_t enough = enough_for(bytes), before = now();
  smaller_ = enough < before ? smaller_ + 1 : 0;
  if (enough < before && smaller_ < kInARow) return;
  smaller_ = 0;
  room_.store(enough, std::memory_order_relaxed);
}

}  // namespace hvdlite
