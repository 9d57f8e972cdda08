#include "reduce.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "scaled_integer.h"

namespace hvdlite {
namespace {

struct Reduction {
  const char* const* sources;
  std::size_t source_count;
  char* const* destinations;
  std::size_t destination_count;
  std::uint64_t nbytes;  // of each array
  double prescale;
  double postscale;
  double divisor;  // to divide by instead of multiplying with postscale; 0 where there is none
};

using ReduceKernel = void (*)(const Reduction&);

}  // namespace
}  // namespace hvdlite

#define HVDLITE_KERNELS "reduce_kernels.h"
#include "for_each_instruction_set.h"

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

// n where `factor` is 1 / n and multiplying with it would round twice; else 0.
double divisor_of(double factor) {
  constexpr double kAbove = 1 << 24;  // whole numbers below are exact in fp32
  const double n = std::nearbyint(1.0 / factor);
  int exponent = 0;
  const bool is_reciprocal = std::abs(n) < kAbove && 1.0 / n == factor;
  return is_reciprocal && std::abs(std::frexp(n, &exponent)) != 0.5 ? n : 0.0;
}

}  // namespace

void require_reducible(DType dtype, Op op) {
  if (kernel_for(dtype, op, false) == nullptr) {
    throw std::invalid_argument("dtype " + std::to_string(static_cast<int>(dtype)) + " with op " +
                                std::to_string(static_cast<int>(op)) + " does not reduce");
  }
}

void reduce(const std::vector<std::uintptr_t>& destinations, const std::vector<std::uintptr_t>& sources,
            std::uint64_t numel, DType dtype, Op op, double prescale, double postscale) {
  if (sources.empty()) throw std::invalid_argument("reduce: at least one source is needed");
  require_reducible(dtype, op);
  const auto* from = reinterpret_cast<const char* const*>(sources.data());
  const auto* to = reinterpret_cast<char* const*>(destinations.data());
  const ReduceKernel kernel = kernel_for(dtype, op, prescale != 1.0 || postscale != 1.0);
  kernel({from, sources.size(), to, destinations.size(), numel * item_bytes(dtype), prescale, postscale,
          divisor_of(postscale)});
}

}  // namespace hvdlite
