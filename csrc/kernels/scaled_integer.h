// Scaling integers, as reduce.cpp and pack.cpp do it.
#pragma once

#include <cstdint>
#include <limits>

namespace hvdlite {

// value * factor in fp64, or value / divisor where that is not 0, truncated towards zero; out of range saturates, NaN
// gives 0. A divisor is a whole number, and neither 1 nor -1; int64, which fp64 does not hold, is divided as it is.
// Written so that loops over it have no branches, and become vector code.
template <class Integer>
inline Integer scaled_integer(Integer value, double factor, double divisor = 0.0) {
  if (sizeof(Integer) == 8 && divisor != 0.0) return value / static_cast<Integer>(divisor);
  using Limits = std::numeric_limits<Integer>;
  constexpr double kLowest = static_cast<double>(Limits::lowest());
  constexpr double kAbove = static_cast<double>(Limits::max() / 2 + 1) * 2.0;  // max() + 1, also where max() is no fp64
  constexpr double kHighest = sizeof(Integer) < 8 ? kAbove - 1 : kAbove - 1024;  // the fp64 before that
  const double whole = static_cast<double>(value);
  const double exact = divisor == 0.0 ? whole * factor : whole / divisor;
  const double number = exact == exact ? exact : 0.0;
  const double high_enough = number > kLowest ? number : kLowest;
  const double in_range = high_enough < kHighest ? high_enough : kHighest;
  const Integer truncated = static_cast<Integer>(in_range);
  return number >= kAbove ? Limits::max() : truncated;
}

}  // namespace hvdlite
