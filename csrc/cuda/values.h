// What kernels are made of: elements and the values that they stand for, and groups of them, moved at once.
#pragma once

#include "portable.h"

namespace hvdlite::kernels {

// Elements by their bits.
struct Float16 {
  unsigned short bits;
};
struct Bfloat16 {
  unsigned short bits;
};

HVDLITE_DEVICE constexpr Count smaller(Count a, Count b) { return a < b ? a : b; }
HVDLITE_DEVICE constexpr Count larger(Count a, Count b) { return a > b ? a : b; }

// Groups of elements, moved at once.

template <unsigned kBytes>
struct RawOf;
template <>
struct RawOf<1> {
  using type = Raw1;
};
template <>
struct RawOf<2> {
  using type = Raw2;
};
template <>
struct RawOf<4> {
  using type = Raw4;
};
template <>
struct RawOf<8> {
  using type = Raw8;
};
template <>
struct RawOf<16> {
  using type = Raw16;
};

template <class E, unsigned kCount>
union Group {
  typename RawOf<kCount * sizeof(E)>::type raw;
  E items[kCount];
};

template <unsigned kCount, class E>
HVDLITE_DEVICE Group<E, kCount> load(Address array, Count at) {
  before_access();
  Group<E, kCount> group;
  group.raw = *reinterpret_cast<const decltype(group.raw)*>(array + at * sizeof(E));
  return group;
}

template <unsigned kCount, class E>
HVDLITE_DEVICE void store(Address array, Count at, const Group<E, kCount>& group) {
  before_access();
  *reinterpret_cast<decltype(group.raw)*>(array + at * sizeof(E)) = group.raw;
}

// Elements up to the first at a multiple of kCount of them.
template <unsigned kCount, class E>
HVDLITE_DEVICE Count elements_before_group(Address array) {
  return (kCount - array / sizeof(E) % kCount) % kCount;
}

// body.run<kCount>(i) for groups of kCount elements from `head` on, and body.run<1>(i) for the elements around them;
// those of thread `first` of `stride`.
template <unsigned kCount, class Body>
HVDLITE_DEVICE void for_each_group(Count numel, Count head, Count first, Count stride, const Body& body) {
  head = smaller(head, numel);
  const Count groups = (numel - head) / kCount, singles = numel - groups * kCount;
  for (Count i = first; i < groups; i += stride) body.template run<kCount>(head + i * kCount);
  for (Count i = first; i < singles; i += stride) body.template run<1>(i < head ? i : i + groups * kCount);
}

// The same for the threads of a grid, and for those of a block.
template <unsigned kCount, class Body>
HVDLITE_DEVICE void for_each_group_by_grid(Count numel, Count head, const Body& body) {
  const GpuThread own = this_thread();
  for_each_group<kCount>(numel, head, Count(own.block) * own.threads + own.index, Count(own.blocks) * own.threads,
                         body);
}
template <unsigned kCount, class Body>
HVDLITE_DEVICE void for_each_group_by_block(Count numel, Count head, const Body& body) {
  const GpuThread own = this_thread();
  for_each_group<kCount>(numel, head, own.index, own.threads, body);
}

// Between elements and what arithmetic happens on: fp32 for 16-bit floats.

template <class E>
struct ValueOf {
  using type = E;
};
template <>
struct ValueOf<Float16> {
  using type = float;
};
template <>
struct ValueOf<Bfloat16> {
  using type = float;
};
template <class E>
using Value = typename ValueOf<E>::type;

template <class E>
HVDLITE_DEVICE E widened(E element) {
  return element;
}
HVDLITE_DEVICE float widened(Float16 element) { return widened_half(element.bits); }
HVDLITE_DEVICE float widened(Bfloat16 element) { return float_of(unsigned(element.bits) << 16); }

HVDLITE_DEVICE Bfloat16 to_bfloat16(float value) {
  const unsigned bits = bits_of(value);
  const unsigned nan = (bits >> 16) | 0x40;
  const unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<unsigned short>(value != value ? nan : rounded)};
}

// fp32 rounded to odd, which may be rounded once more, to 16 bits; see csrc/kernels/pack_kernels.h.
HVDLITE_DEVICE float rounded_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const bool too_far = (back < 0 ? -back : back) > (value < 0 ? -value : value);
  const bool inexact = back != value && value == value;
  return float_of((bits_of(nearest) - (too_far ? 1 : 0)) | (inexact ? 1 : 0));
}

template <class E>
struct To {
  static HVDLITE_DEVICE E from(E value) { return value; }
};
template <>
struct To<float> {
  static HVDLITE_DEVICE float from(double value) { return static_cast<float>(value); }
};
template <>
struct To<Float16> {
  static HVDLITE_DEVICE Float16 from(float value) { return {narrowed_half(value)}; }
  static HVDLITE_DEVICE Float16 from(double value) { return from(rounded_to_odd(value)); }
};
template <>
struct To<Bfloat16> {
  static HVDLITE_DEVICE Bfloat16 from(float value) { return to_bfloat16(value); }
  static HVDLITE_DEVICE Bfloat16 from(double value) { return from(rounded_to_odd(value)); }
};

}  // namespace hvdlite::kernels
