#include "kernels/reduce.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/scaled_integer.h"
#include "kernels/with_subnormals.h"

namespace hvdlite {

struct Reduction {
  const char* const* sources;
  std::size_t source_count;
  char* const* destinations;
  std::size_t destination_count;
  std::uint64_t begin;  // in bytes, of each array
  std::uint64_t end;
  double prescale;
  double postscale;
  double divisor;  // to divide by instead of multiplying with postscale; 0 where there is none
};

using ReduceKernel = void (*)(const Reduction&);

}  // namespace hvdlite

#define HVDLITE_KERNELS "reduce_kernels.h"
#include "kernels/for_each_instruction_set.h"

namespace hvdlite {
namespace {

ReduceKernel kernel_for(DType dtype, Op op, bool scaled) {
  switch (instruction_set()) {
#if HVDLITE_X86
    case InstructionSet::kAvx512:
      return avx512::find_kernel(dtype, op, scaled);
    case InstructionSet::kAvx2:
      return avx2::find_kernel(dtype, op, scaled);
#endif
    default:
      return plain::find_kernel(dtype, op, scaled);
  }
}

// n where `factor` is 1 / n and to multiply with it is not as good as to divide by n; else 0.
double divisor_of(double factor, DType dtype) {
  constexpr double kAbove = 1 << 24;  // whole numbers below are exact in fp32
  const double n = std::nearbyint(1.0 / factor);
  int exponent = 0;
  const bool is_reciprocal = std::abs(n) < kAbove && 1.0 / n == factor;
  const bool is_power_of_two = std::abs(std::frexp(n, &exponent)) == 0.5;
  const bool is_as_good = is_power_of_two && (dtype != DType::kInt64 || std::abs(n) == 1.0);
  return is_reciprocal && !is_as_good ? n : 0.0;
}

}  // namespace

Reducer::Reducer(DType dtype, Op op, double prescale, double postscale)
    : kernel_(kernel_for(dtype, op, prescale != 1.0 || postscale != 1.0)),
      prescale_(prescale),
      postscale_(postscale),
      divisor_(divisor_of(postscale, dtype)) {
  if (kernel_ == nullptr) {
    throw std::invalid_argument("dtype " + std::to_string(static_cast<int>(dtype)) + " with op " +
                                std::to_string(static_cast<int>(op)) + " does not reduce");
  }
  item_bytes_ = item_bytes(dtype);
}

void Reducer::reduce(const std::vector<std::uintptr_t>& destinations, const std::vector<std::uintptr_t>& sources,
                     std::uint64_t begin, std::uint64_t end) const {
  const WithSubnormals computed;
  const auto* from = reinterpret_cast<const char* const*>(sources.data());
  const auto* to = reinterpret_cast<char* const*>(destinations.data());
  kernel_({from, sources.size(), to, destinations.size(), begin * item_bytes_, end * item_bytes_, prescale_, postscale_,
           divisor_});
}

}  // namespace hvdlite
