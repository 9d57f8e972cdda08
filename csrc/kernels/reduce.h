// Elementwise reductions over several arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/elements.h"

namespace hvdlite {

struct Reduction;

// destination[i] = postscale * (prescale * source_0[i] op prescale * source_1[i] op ...) for every destination, for all
// i of a range.
//
// Each element is read once from every source and written once to every destination. A destination may be a source;
// other overlaps are not allowed. Where `postscale` is 1 / n for a whole number n, the result is divided by n, so an
// average is the division of the sum, to the last bit. The result depends on nothing but the values and the order of
// the sources: not on the instruction set, not on alignment, not on the range.
class Reducer {
 public:
  // Throws std::invalid_argument unless elements of this type reduce by this operation.
  Reducer(DType dtype, Op op, double prescale, double postscale);

  void reduce(const std::vector<std::uintptr_t>& destinations, const std::vector<std::uintptr_t>& sources,
              std::uint64_t begin, std::uint64_t end) const;

  double divisor() const { return divisor_; }  // to divide by instead of multiplying with postscale; or 0

 private:
  void (*kernel_)(const Reduction&);
  std::size_t item_bytes_;
  double prescale_;
  double postscale_;
  double divisor_;
};

}  // namespace hvdlite
