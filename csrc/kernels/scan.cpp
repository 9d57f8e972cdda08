#include "kernels/scan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace hvdlite {
namespace {

constexpr std::uint64_t kBlock = 4096;  // elements between two looks at what was found

template <class To, class From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Without their signs, floats are ordered as the integers of the same bits are, infinities and NaN above all numbers.
// `limit` - bits is negative where they are beyond it, which compilers turn into two instructions per vector.
template <class Bits>
bool has_beyond(std::uintptr_t address, std::uint64_t numel, Bits limit) {
  using Values __attribute__((may_alias)) = Bits;
  const auto* values = reinterpret_cast<const Values*>(address);
  for (std::uint64_t begin = 0; begin < numel; begin += kBlock) {
    const std::uint64_t end = std::min(numel, begin + kBlock);
    Bits differences = 0;
    for (std::uint64_t i = begin; i < end; ++i) {
      const auto magnitude = static_cast<Bits>(values[i] & std::numeric_limits<Bits>::max());
      differences = static_cast<Bits>(differences | static_cast<Bits>(limit - magnitude));
    }
    if (differences < 0) return true;
  }
  return false;
}

template <class Bits>
std::int64_t first_with(const std::vector<std::uintptr_t>& addresses, const std::vector<std::uint64_t>& numels,
                        Bits limit) {
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (has_beyond<Bits>(addresses[i], numels[i], limit)) return static_cast<std::int64_t>(i);
  }
  return -1;
}

float within_float(double limit) {
  return static_cast<float>(std::min(limit, static_cast<double>(std::numeric_limits<float>::max())));
}

}  // namespace

std::int64_t first_beyond(const std::vector<std::uintptr_t>& addresses, const std::vector<std::uint64_t>& numels,
                          DType dtype, double limit) {
  if (addresses.size() != numels.size()) throw std::invalid_argument("first_beyond: one count per address is needed");
  switch (dtype) {
    case DType::kFloat16:
      return first_with<std::int16_t>(addresses, numels, 0x7bff);  // its largest; no limit is below that
    case DType::kBfloat16: {
      const auto bits = static_cast<std::int16_t>(bits_of<std::int32_t>(within_float(limit)) >> 16);
      return first_with<std::int16_t>(addresses, numels, bits);
    }
    case DType::kFloat32:
      return first_with<std::int32_t>(addresses, numels, bits_of<std::int32_t>(within_float(limit)));
    case DType::kFloat64:
      return first_with<std::int64_t>(addresses, numels,
                                      bits_of<std::int64_t>(std::min(limit, std::numeric_limits<double>::max())));
    default:
      throw std::invalid_argument(std::string("first_beyond: ") + name_of(dtype) + " has no infinity");
  }
}

std::vector<std::int64_t> bit_sums(const std::vector<std::uintptr_t>& addresses,
                                   const std::vector<std::uint64_t>& nbytes) {
  if (addresses.size() != nbytes.size()) throw std::invalid_argument("bit_sums: one size per address is needed");
  std::vector<std::int64_t> sums;
  sums.reserve(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(addresses[i]);
    const std::uint64_t whole = nbytes[i] / 8 * 8;
    std::uint64_t sum = 0;
    for (std::uint64_t at = 0; at < whole; at += 8) {
      std::uint64_t word;
      std::memcpy(&word, bytes + at, sizeof(word));
      sum += word;
    }
    for (std::uint64_t at = whole; at < nbytes[i]; ++at) sum += bytes[at];
    sums.push_back(bits_of<std::int64_t>(sum));
  }
  return sums;
}

}  // namespace hvdlite
