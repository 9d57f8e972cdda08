#include "node/small_gather.h"

#include <cstring>
#include <stdexcept>

#include "kernels/ascending_copy.h"

namespace hvdlite {

WaitStatus SmallGather::run(const std::vector<std::int64_t>& numbers, const std::vector<Piece>& pieces,
                            double timeout_s) {
  if (!places_.has_begun()) begin(numbers, pieces);
  const WaitStatus status = await_all(timeout_s);
  end();
  return status;
}

void SmallGather::begin(const std::vector<std::int64_t>& numbers, const std::vector<Piece>& pieces) {
  if (numbers.size() > most_numbers()) throw std::invalid_argument("SmallGather: too many numbers");
  width_ = numbers.size();
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.second;
  places_.begin();
  const std::uintptr_t place = places_.place(places_.rank());
  if (width_ != 0) std::memcpy(reinterpret_cast<void*>(place), numbers.data(), width_ * sizeof(std::int64_t));
  if (bytes <= room(width_)) {
    std::uintptr_t at = place + width_ * sizeof(std::int64_t);
    for (const auto& [address, size] : pieces) {
      ascending_copy(at, address, size);
      at += size;
    }
  }
  places_.publish();
}

const std::int64_t* SmallGather::numbers(std::uint32_t rank) const {
  return reinterpret_cast<const std::int64_t*>(places_.place(rank));
}

std::uintptr_t SmallGather::bytes(std::uint32_t rank) const {
  return places_.place(rank) + width_ * sizeof(std::int64_t);
}

void SmallGather::read(std::uintptr_t target, const std::vector<Part>& parts) const {
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    const auto [begin, size] = parts.at(rank);
    ascending_copy(target, bytes(rank) + begin, size);
    target += size;
  }
}

}  // namespace hvdlite
