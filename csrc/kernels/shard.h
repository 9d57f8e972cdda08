// What each rank reduces of a buffer: as shard_bounds in hvdlite/memory/layout.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements.h"

namespace hvdlite {

struct Bounds {
  std::uint64_t begin, end;
};

// Equal shares in elements; each starts on a cache line, so no line is written by two ranks.
inline Bounds shard_bounds(std::uint64_t numel, std::uint64_t size, std::uint64_t rank, DType dtype) {
  const std::uint64_t per_line = kCacheLine / item_bytes(dtype);
  const std::uint64_t share = ((numel + size - 1) / size + per_line - 1) / per_line * per_line;
  const std::uint64_t begin = std::min(numel, share * rank);
  return {begin, std::min(numel, begin + share)};
}

}  // namespace hvdlite
