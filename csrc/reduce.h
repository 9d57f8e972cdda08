// Elementwise reductions over several arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "elements.h"

namespace hvdlite {

// Throws std::invalid_argument unless `reduce` takes this pair.
void require_reducible(DType dtype, Op op);

// destination[i] = postscale * (prescale * source_0[i] op prescale * source_1[i] op ...) for every destination.
//
// Each element is read once from every source and written once to every destination. A destination may be a source;
// other overlaps are not allowed. Where `postscale` is 1 / n for a whole number n, the result is divided by n, so an
// average is the division of the sum, to the last bit. The result depends on nothing but the values and the order of
// the sources: not on the instruction set, not on alignment, not on numel.
void reduce(const std::vector<std::uintptr_t>& destinations, const std::vector<std::uintptr_t>& sources,
            std::uint64_t numel, DType dtype, Op op, double prescale, double postscale);

}  // namespace hvdlite
