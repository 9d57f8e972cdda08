#include "elements.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace nccl_sim {
namespace {

float half_to_float(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(fraction), -24)
                                     : std::ldexp(float(fraction + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}

std::uint16_t float_to_half(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < std::ldexp(1.0f, -14)) return sign | unsigned(std::nearbyint(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  return sign | ((unsigned(exponent + 14) << 10) + unsigned(std::nearbyint(std::ldexp(size, 10 - exponent))));
}

float bfloat_to_float(std::uint16_t bits) {
  const std::uint32_t word = std::uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

std::uint16_t float_to_bfloat(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return std::isnan(value) ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

template <class T>
T combined(T a, T b, int op) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<std::conditional_t<(sizeof(T) < 4), int, T>>;
    if (op == 0) return T(U(a) + U(b));
    if (op == 1) return T(U(a) * U(b));
  }
  return op == 0 ? a + b : op == 1 ? a * b : op == 2 ? (b > a ? b : a) : (b < a ? b : a);
}

template <class Value, class Element, class Widen, class Narrow>
void reduce_as(void* to, const std::vector<const char*>& from, std::size_t count, int op, Widen widen, Narrow narrow) {
  for (std::size_t i = 0; i < count; ++i) {
    Value value{};
    for (std::size_t rank = 0; rank < from.size(); ++rank) {
      const Value next = widen(reinterpret_cast<const Element*>(from[rank])[i]);
      value = rank == 0 ? next : combined<Value>(value, next, op);
    }
    static_cast<Element*>(to)[i] = narrow(value);
  }
}

template <class T>
void reduce_as(void* to, const std::vector<const char*>& from, std::size_t count, int op) {
  const auto same = [](T value) { return value; };
  reduce_as<T, T>(to, from, count, op, same, same);
}

}  // namespace

std::size_t item_bytes(int dtype) { return std::size_t("\1\1\4\4\10\10\2\4\10\2"[dtype]); }

void reduce(void* to, const std::vector<const char*>& from, std::size_t count, int dtype, int op) {
  switch (dtype) {
    case 0:
      return reduce_as<std::int8_t>(to, from, count, op);
    case 1:
      return reduce_as<std::uint8_t>(to, from, count, op);
    case 2:
      return reduce_as<std::int32_t>(to, from, count, op);
    case 3:
      return reduce_as<std::uint32_t>(to, from, count, op);
    case 4:
      return reduce_as<std::int64_t>(to, from, count, op);
    case 5:
      return reduce_as<std::uint64_t>(to, from, count, op);
    case 6:
      return reduce_as<float, std::uint16_t>(to, from, count, op, half_to_float, float_to_half);
    case 7:
      return reduce_as<float>(to, from, count, op);
    case 8:
      return reduce_as<double>(to, from, count, op);
    default:
      return reduce_as<float, std::uint16_t>(to, from, count, op, bfloat_to_float, float_to_bfloat);
  }
}

}  // namespace nccl_sim
