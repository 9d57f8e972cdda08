// What each rank of a node tells all others: some numbers, and bytes where there is room for them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "node/places_in_turn.h"

namespace hvdlite {

class SmallGather {
 public:
  using Piece = std::pair<std::uintptr_t, std::uint64_t>;  // address, bytes

  // `places` have to live as long.
  explicit SmallGather(PlacesInTurn& places) : places_(places) {}

  // Bytes for which there is room beside so many numbers; `width` is at most `most_numbers`.
  std::uint64_t most_numbers() const { return places_.most_bytes() / sizeof(std::int64_t); }
  std::uint64_t room(std::uint64_t width) const { return places_.most_bytes() - width * sizeof(std::int64_t); }

  // Tells `numbers`, of which all ranks have as many, and the bytes of all pieces if there is room for these; and waits
  // for all ranks.
  WaitStatus run(const std::vector<std::int64_t>& numbers, const std::vector<Piece>& pieces, double timeout_s);

  // The parts of `run`: what it has told already is not told again.
  void begin(const std::vector<std::int64_t>& numbers, const std::vector<Piece>& pieces);
  WaitStatus await_all(double timeout_s) { return places_.await_all(timeout_s); }
  void end() { places_.end(); }

  // What a rank has told, once all have, until this rank begins something else in these places.
  const std::int64_t* numbers(std::uint32_t rank) const;
  std::uintptr_t bytes(std::uint32_t rank) const;

  // Of each rank, in their order, parts of its bytes, as (where they begin, how many), one after the other.
  using Part = std::pair<std::uint64_t, std::uint64_t>;
  void read(std::uintptr_t target, const std::vector<Part>& parts) const;

  std::uint32_t size() const { return places_.size(); }
  std::uint32_t rank() const { return places_.rank(); }
  const PlacesInTurn& places() const { return places_; }

 private:
  PlacesInTurn& places_;
  std::uint64_t width_ = 0;
};

}  // namespace hvdlite
