// What is read of tensors and not written: which of them has a value that is too large, and what their bits add up to.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/elements.h"

namespace hvdlite {

// The first of the tensors at `addresses` that has an element which is NaN, or beyond `limit` in absolute value, or -1.
// A limit beyond the largest number of the type stands for that: infinities are found with any limit.
//
// Throws std::invalid_argument unless `dtype` is one of floats.
std::int64_t first_beyond(const std::vector<std::uintptr_t>& addresses, const std::vector<std::uint64_t>& numels,
                          DType dtype, double limit);

// Of each block of memory the sum of its 64-bit words, and of the bytes after the last one.
std::vector<std::int64_t> bit_sums(const std::vector<std::uintptr_t>& addresses,
                                   const std::vector<std::uint64_t>& nbytes);

}  // namespace hvdlite
