// Kernels for memory of several GPUs that has one address beside its own ones: what is written there is written to all
// of them, and what is read is their sum, which the switch between the GPUs makes (NVLink SHARP, sm_90 and newer).
//
// Vectors of 16 bytes only, since it takes no single 16-bit element. In which order it adds is its own affair; 16-bit
// floats are added in fp32 and rounded once. Whoever reads at a GPU's own address what was written here, or the other
// way round, comes after the end of the kernel.
#pragma once

#include "values.h"

namespace hvdlite::kernels {

template <class E>
using Vector = Group<E, kVectorBytes / sizeof(E)>;

#ifdef __CUDACC__

HVDLITE_DEVICE void store_to_all(Address multicast, const Raw16& raw) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(multicast), "f"(float_of(raw.x)),
               "f"(float_of(raw.y)), "f"(float_of(raw.z)), "f"(float_of(raw.w))
               : "memory");
}

HVDLITE_DEVICE void add_up(Address multicast, Vector<Float16>& sum) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(sum.raw.x), "=r"(sum.raw.y), "=r"(sum.raw.z), "=r"(sum.raw.w)
               : "l"(multicast)
               : "memory");
}
HVDLITE_DEVICE void add_up(Address multicast, Vector<Bfloat16>& sum) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(sum.raw.x), "=r"(sum.raw.y), "=r"(sum.raw.z), "=r"(sum.raw.w)
               : "l"(multicast)
               : "memory");
}
HVDLITE_DEVICE void add_up(Address multicast, Vector<float>& sum) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(sum.items[0]), "=f"(sum.items[1]), "=f"(sum.items[2]), "=f"(sum.items[3])
               : "l"(multicast)
               : "memory");
}
HVDLITE_DEVICE void add_up(Address multicast, Vector<double>& sum) {
  for (unsigned i = 0; i < 2; ++i) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.f64 %0, [%1];"
                 : "=d"(sum.items[i])
                 : "l"(multicast + i * sizeof(double))
                 : "memory");
  }
}

#else

inline void store_to_all(Address multicast, const Raw16& raw) {
  const Bound bound = bound_to(multicast);
  Vector<unsigned char> group;
  group.raw = raw;
  for (unsigned i = 0; i < bound.count; ++i) store(bound.copies[i], 0, group);
}

template <class E>
void add_up(Address multicast, Vector<E>& sum) {
  constexpr unsigned kCount = kVectorBytes / sizeof(E);
  const Bound bound = bound_to(multicast);
  Value<E> values[kCount] = {};
  for (unsigned copy = 0; copy < bound.count; ++copy) {
    const auto group = load<kCount, E>(bound.copies[copy], 0);
    for (unsigned i = 0; i < kCount; ++i) {
      const Value<E> value = widened(group.items[i]);
      values[i] = copy == 0 ? value : values[i] + value;
    }
  }
  for (unsigned i = 0; i < kCount; ++i) sum.items[i] = To<E>::from(values[i]);
}

#endif

// body.run(i) for the vectors of this thread.
template <class Body>
HVDLITE_DEVICE void for_each_vector(Count vectors, const Body& body) {
  const GpuThread own = this_thread();
  const Count stride = Count(own.blocks) * own.threads;
  for (Count i = Count(own.block) * own.threads + own.index; i < vectors; i += stride) body.run(i);
}

struct StoreBody {
  const MulticastStore& p;

  HVDLITE_DEVICE void run(Count at) const {
    store_to_all(p.multicast + at * kVectorBytes, load<kVectorBytes, unsigned char>(p.source, at * kVectorBytes).raw);
  }
};

HVDLITE_KERNEL(multicast_store, MulticastStore) { for_each_vector(p.vectors, StoreBody{p}); }

template <class E>
struct SumBody {
  const MulticastSum& p;

  HVDLITE_DEVICE void run(Count at) const {
    const Address from = p.multicast + at * kVectorBytes;
    Vector<E> sum;
    add_up(from, sum);
    if (p.destination == 0) {
      store_to_all(from, sum.raw);
    } else {
      store(p.destination, at * (kVectorBytes / sizeof(E)), sum);
    }
  }
};

#define HVDLITE_DEFINE(name, E) \
  HVDLITE_KERNEL(multicast_sum_##name, MulticastSum) { for_each_vector(p.vectors, SumBody<E>{p}); }
HVDLITE_ADDED_BY_MULTICAST(HVDLITE_DEFINE)
#undef HVDLITE_DEFINE

}  // namespace hvdlite::kernels
