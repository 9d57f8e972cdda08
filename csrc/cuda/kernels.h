// The kernels: fill, reduce, pack and unpack. No thread waits for another, so any number of blocks will do.
#pragma once

#include "values.h"

namespace hvdlite::kernels {

// Fill.

struct FillBody {
  const Fill& p;

  template <unsigned kCount>
  HVDLITE_DEVICE void run(Count at) const {
    Group<unsigned char, kCount> group;
    for (unsigned i = 0; i < kCount; ++i) {
      group.items[i] = static_cast<unsigned char>(p.pattern >> ((p.address + at + i) % 8 * 8));
    }
    store(p.address, at, group);
  }
};

HVDLITE_KERNEL(fill, Fill) {
  for_each_group_by_grid<kVectorBytes>(p.nbytes, elements_before_group<kVectorBytes, unsigned char>(p.address),
                                       FillBody{p});
}

// Reduce, as csrc/kernels/reduce_kernels.h does it, to the bit (but for which NaN a NaN is).

template <class T>
struct UnsignedOf {
  using type = T;
};
template <>
struct UnsignedOf<signed char> {
  using type = unsigned char;
};
template <>
struct UnsignedOf<short> {
  using type = unsigned;  // the product of two unsigned shorts may overflow the int that it is
};
template <>
struct UnsignedOf<int> {
  using type = unsigned;
};
template <>
struct UnsignedOf<long long> {
  using type = unsigned long long;
};
template <class T>
using Wrapping = typename UnsignedOf<T>::type;  // integers that overflow wrap

template <Combining kOp>
struct Combine;
template <>
struct Combine<kSum> {
  template <class T>
  static HVDLITE_DEVICE T apply(T a, T b) {
    return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
  }
};
template <>
struct Combine<kProduct> {
  template <class T>
  static HVDLITE_DEVICE T apply(T a, T b) {
    return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b));
  }
};
// A NaN on either side wins.
template <>
struct Combine<kMin> {
  template <class T>
  static HVDLITE_DEVICE T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
template <>
struct Combine<kMax> {
  template <class T>
  static HVDLITE_DEVICE T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

// As scaled_integer.h, which is made for vector code of the host. Not inlined, since dozens of loops have a call that
// few people ever make.
template <class Integer>
HVDLITE_DEVICE_FUNCTION Integer scaled(Integer value, double factor, double divisor) {
  constexpr unsigned kValueBits = sizeof(Integer) * 8 - (Integer(-1) < Integer(0) ? 1 : 0);
  constexpr Integer kHighest = static_cast<Integer>(~0ull >> (64 - kValueBits));
  constexpr Integer kLowest =
      static_cast<Integer>(-1 - kHighest) < 0 ? static_cast<Integer>(-1 - kHighest) : Integer(0);
  constexpr double kAbove = static_cast<double>(1ull << (kValueBits - 1)) * 2.0;
  if (sizeof(Integer) == 8 && divisor != 0.0) return value / static_cast<Integer>(divisor);
  if (factor == 1.0 && divisor == 0.0) return value;
  const double whole = static_cast<double>(value);
  const double exact = divisor == 0.0 ? whole * factor : whole / divisor;
  if (exact != exact) return 0;
  if (exact >= kAbove) return kHighest;
  return exact > static_cast<double>(kLowest) ? static_cast<Integer>(exact) : kLowest;
}
HVDLITE_DEVICE float scaled(float value, double factor, double divisor) {
  return divisor == 0.0 ? value * static_cast<float>(factor) : value / static_cast<float>(divisor);
}
HVDLITE_DEVICE double scaled(double value, double factor, double divisor) {
  return divisor == 0.0 ? value * factor : value / divisor;
}

template <class E, Combining kOp, bool kScaled>
struct ReduceBody {
  const Reduce& p;

  template <unsigned kCount>
  HVDLITE_DEVICE void run(Count at) const {
    Value<E> values[kCount];
    read(p.sources[0], at, values);
    HVDLITE_UNROLL
    for (unsigned source = 1; source < p.source_count; ++source) {
      Value<E> next[kCount];
      read(p.sources[source], at, next);
      for (unsigned i = 0; i < kCount; ++i) values[i] = Combine<kOp>::apply(values[i], next[i]);
    }
    Group<E, kCount> result;
    for (unsigned i = 0; i < kCount; ++i) {
      if constexpr (kScaled) values[i] = scaled(values[i], p.postscale, p.divisor);
      result.items[i] = To<E>::from(values[i]);
    }
    for (unsigned i = 0; i < p.destination_count; ++i) store(p.destinations[i], at, result);
  }

  template <unsigned kCount>
  HVDLITE_DEVICE void read(Address source, Count at, Value<E> (&values)[kCount]) const {
    const auto group = load<kCount, E>(source, at);
    for (unsigned i = 0; i < kCount; ++i) {
      values[i] = widened(group.items[i]);
      if constexpr (kScaled) values[i] = scaled(values[i], p.prescale, 0.0);
    }
  }
};

template <class E, Combining kOp>
HVDLITE_DEVICE void reduce_by(const Reduce& p) {
  constexpr unsigned kCount = static_cast<unsigned>(smaller(kVectorBytes / sizeof(E), kMostReduced));
  constexpr bool kIsInteger = Value<E>(1) / Value<E>(2) == Value<E>(0);
  if (kIsInteger && !p.scaled) {
    const ReduceBody<E, kOp, !kIsInteger> body{p};
    for_each_group_by_grid<kCount>(p.numel, p.head, body);
  } else {  // a float times 1 takes no time
    const ReduceBody<E, kOp, true> body{p};
    for_each_group_by_grid<kCount>(p.numel, p.head, body);
  }
}

template <class E>
HVDLITE_DEVICE void reduce_elements(const Reduce& p) {
  switch (p.op) {
    case kSum:
      return reduce_by<E, kSum>(p);
    case kMin:
      return reduce_by<E, kMin>(p);
    case kMax:
      return reduce_by<E, kMax>(p);
    case kProduct:
      return reduce_by<E, kProduct>(p);
  }
}

#define HVDLITE_DEFINE(name, E) \
  HVDLITE_KERNEL(reduce_##name, Reduce) { reduce_elements<E>(p); }
HVDLITE_REDUCED(HVDLITE_DEFINE)
#undef HVDLITE_DEFINE

// Pack and unpack. A block moves a tile of the buffer after the other, and finds the tensors that have a part of it.

template <class From, class Into>
struct MoveBody {
  Address to;
  Address from;

  template <unsigned kCount>
  HVDLITE_DEVICE void run(Count at) const {
    const auto elements = load<kCount, From>(from, at);
    Group<Into, kCount> result;
    for (unsigned i = 0; i < kCount; ++i) result.items[i] = To<Into>::from(widened(elements.items[i]));
    store(to, at, result);
  }
};

// `numel` elements, by the threads of a block. The side with the larger elements goes in whole vectors.
template <class From, class Into>
HVDLITE_DEVICE void move(Address to, Address from, Count numel) {
  constexpr unsigned kCount = static_cast<unsigned>(kVectorBytes / larger(sizeof(From), sizeof(Into)));
  const Count head = elements_before_group<kCount, Into>(to);
  const bool alike = head == elements_before_group<kCount, From>(from);
  for_each_group_by_block<kCount>(numel, alike ? head : numel, MoveBody<From, Into>{to, from});
}

template <class E>
struct ZeroBody {
  Address to;

  template <unsigned kCount>
  HVDLITE_DEVICE void run(Count at) const {
    store(to, at, Group<E, kCount>{});
  }
};

template <class E>
HVDLITE_DEVICE void zero(Address to, Count numel) {
  constexpr unsigned kCount = kVectorBytes / sizeof(E);
  for_each_group_by_block<kCount>(numel, elements_before_group<kCount, E>(to), ZeroBody<E>{to});
}

HVDLITE_DEVICE unsigned first_ending_after(const Tensors& p, Count element) {
  unsigned begin = 0, end = p.count;
  while (begin < end) {
    const unsigned middle = (begin + end) / 2;
    if (p.tensors[middle].end > element) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// body.part(tensor, begin, end) for what the block's tiles have of each tensor, and body.gap(begin, end) between them.
template <class Body>
HVDLITE_DEVICE void for_each_part(const Tensors& p, const Body& body) {
  const GpuThread own = this_thread();
  for (Count tile = p.begin + own.block * kTileNumel; tile < p.end; tile += own.blocks * kTileNumel) {
    const Count stop = smaller(tile + kTileNumel, p.end);
    Count at = tile;
    for (unsigned i = first_ending_after(p, tile); at < stop; ++i) {
      const Count begin = i < p.count ? smaller(larger(p.tensors[i].begin, at), stop) : stop;
      if (at < begin) body.gap(at, begin);
      at = begin;
      if (at == stop) break;
      const Count end = smaller(p.tensors[i].end, stop);
      body.part(p.tensors[i], at, end);
      at = end;
    }
  }
}

template <class From, class Into>
struct PackBody {
  const Tensors& p;

  HVDLITE_DEVICE Address place(Count at) const { return p.buffer + (at - p.begin) * sizeof(Into); }
  HVDLITE_DEVICE void gap(Count begin, Count end) const { zero<Into>(place(begin), end - begin); }
  HVDLITE_DEVICE void part(const PlacedTensor& tensor, Count begin, Count end) const {
    const Address from = tensor.address + (begin - tensor.begin) * sizeof(From);
    if (tensor.address == 0) {
      gap(begin, end);
    } else if (from != place(begin)) {  // else it lives at its place
      move<From, Into>(place(begin), from, end - begin);
    }
  }
};

template <class From, class Into>
struct UnpackBody {
  const Tensors& p;

  HVDLITE_DEVICE void gap(Count, Count) const {}
  HVDLITE_DEVICE void part(const PlacedTensor& tensor, Count begin, Count end) const {
    const Address from = p.buffer + (begin - p.begin) * sizeof(From);
    const Address to = tensor.address + (begin - tensor.begin) * sizeof(Into);
    if (tensor.address != 0 && to != from) move<From, Into>(to, from, end - begin);
  }
};

#define HVDLITE_DEFINE(from_name, From, to_name, Into)                                                 \
  HVDLITE_KERNEL(pack_##from_name##_##to_name, Tensors) { for_each_part(p, PackBody<From, Into>{p}); } \
  HVDLITE_KERNEL(unpack_##from_name##_##to_name, Tensors) { for_each_part(p, UnpackBody<From, Into>{p}); }
HVDLITE_CASTS(HVDLITE_DEFINE)
#undef HVDLITE_DEFINE

#define HVDLITE_DEFINE(bytes, E)                                                      \
  HVDLITE_KERNEL(pack_copy_##bytes, Tensors) { for_each_part(p, PackBody<E, E>{p}); } \
  HVDLITE_KERNEL(unpack_copy_##bytes, Tensors) { for_each_part(p, UnpackBody<E, E>{p}); }
HVDLITE_COPIES(HVDLITE_DEFINE)
#undef HVDLITE_DEFINE

}  // namespace hvdlite::kernels
