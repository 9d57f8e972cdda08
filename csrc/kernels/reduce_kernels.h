// The reduction kernels of one instruction set; see for_each_instruction_set.h.

template <class E>
struct Sum {
  using Value = typename Lanes<E>::Value;
  using Wrapping = typename Lanes<E>::Wrapping;
  static Value apply(Value a, Value b) { return (Value)((Wrapping)a + (Wrapping)b); }
};

template <class E>
struct Product {
  using Value = typename Lanes<E>::Value;
  using Wrapping = typename Lanes<E>::Wrapping;
  static Value apply(Value a, Value b) { return (Value)((Wrapping)a * (Wrapping)b); }
};

// A NaN on either side wins: `a` because it differs from itself, `b` because it compares false.
template <class E>
struct Min {
  using Value = typename Lanes<E>::Value;
  static Value apply(Value a, Value b) { return ((a < b) | (a != a)) ? a : b; }
};

template <class E>
struct Max {
  using Value = typename Lanes<E>::Value;
  static Value apply(Value a, Value b) { return ((a > b) | (a != a)) ? a : b; }
};

// Not inlined: one copy per type is enough of a loop that dozens of kernels use and that few people ever run.
template <class Integer>
__attribute__((noinline)) void scale_integers(Integer* items, std::size_t count, double factor, double divisor) {
  for (std::size_t i = 0; i < count; ++i) items[i] = scaled_integer(items[i], factor, divisor);
}

template <class E>
inline typename Lanes<E>::Value scale(typename Lanes<E>::Value value, double factor, double divisor = 0.0) {
  using Scalar = typename Lanes<E>::Scalar;
  if constexpr (std::is_integral<Scalar>::value) {
    if (factor == 1.0 && divisor == 0.0) return value;  // of int64, too, which fp64 does not hold
    Scalar items[kVectorBytes / sizeof(Scalar)];
    store_unaligned(items, value);
    scale_integers(items, kVectorBytes / sizeof(Scalar), factor, divisor);
    return load_unaligned<typename Lanes<E>::Value>(items);
  } else {
    return divisor == 0.0 ? value * static_cast<Scalar>(factor) : value / static_cast<Scalar>(divisor);
  }
}

// A few vectors of elements on their way through all sources, in registers: an element is read once per source and
// written once per destination. Two ideas that measurement rejected:
// - Blocks that stay in the L1 cache, a few sources at a time: slower up to 32 sources (at 16: 14 instead of 19 GB/s on
//   one core) and faster only at 64 (12 instead of 7), where so many ranks share the memory's bandwidth anyway.
// - Streaming stores: 1.4 times slower in place, where a destination is a source and its lines are in the cache
//   already, and no faster elsewhere (2 cores, 2 x 64 MiB).
template <class E, class Combine, bool kScaled>
struct Chunk {
  using L = Lanes<E>;
  using Value = typename L::Value;
  using Packed = typename L::Packed;
  static constexpr std::size_t kBytes = 4 * kVectorBytes;
  static constexpr std::size_t kStep = sizeof(Packed);
  static constexpr std::size_t kCount = kBytes / kStep;

  Value values[kCount][L::kParts];
  Packed result[kCount];

  void start(const char* source, double prescale) {
    for (std::size_t i = 0; i < kCount; ++i) load(source + i * kStep, prescale, values[i]);
  }

  void combine(const char* source, double prescale) {
    for (std::size_t i = 0; i < kCount; ++i) {
      Value next[L::kParts];
      load(source + i * kStep, prescale, next);
      for (std::size_t k = 0; k < L::kParts; ++k) values[i][k] = Combine::apply(values[i][k], next[k]);
    }
  }

  void finish(double postscale, double divisor) {
    for (std::size_t i = 0; i < kCount; ++i) {
      if constexpr (kScaled) {
        for (Value& value : values[i]) value = scale<E>(value, postscale, divisor);
      }
      result[i] = L::narrow(values[i]);
    }
  }

  void write(char* destination) const {
    for (std::size_t i = 0; i < kCount; ++i) store_unaligned(destination + i * kStep, result[i]);
  }

 private:
  static void load(const char* source, double prescale, Value (&loaded)[L::kParts]) {
    L::widen(load_unaligned<Packed>(source), loaded);
    if constexpr (kScaled) {
      for (Value& value : loaded) value = scale<E>(value, prescale);
    }
  }
};

template <class E, class Combine, bool kScaled>
void reduce_arrays(const Reduction& reduction) {
  const Reduction r = reduction;  // a copy of its own: the stores below could alias the caller's
  using Step = Chunk<E, Combine, kScaled>;
  Step chunk;
  std::uint64_t at = r.begin;
  for (; r.end - at >= Step::kBytes; at += Step::kBytes) {
    chunk.start(r.sources[0] + at, r.prescale);
    for (std::size_t i = 1; i < r.source_count; ++i) chunk.combine(r.sources[i] + at, r.prescale);
    chunk.finish(r.postscale, r.divisor);
    for (std::size_t i = 0; i < r.destination_count; ++i) chunk.write(r.destinations[i] + at);
  }

  // The rest goes through the same instructions, padded, so that no element depends on where an array ends.
  const std::size_t rest = r.end - at;
  if (rest == 0) return;
  char padded[Step::kBytes] = {};
  __builtin_memcpy(padded, r.sources[0] + at, rest);
  chunk.start(padded, r.prescale);
  for (std::size_t i = 1; i < r.source_count; ++i) {
    __builtin_memcpy(padded, r.sources[i] + at, rest);
    chunk.combine(padded, r.prescale);
  }
  chunk.finish(r.postscale, r.divisor);
  chunk.write(padded);
  for (std::size_t i = 0; i < r.destination_count; ++i) __builtin_memcpy(r.destinations[i] + at, padded, rest);
}

template <class E>
ReduceKernel find_kernel_of(Op op, bool scaled) {
  switch (op) {
    case Op::kSum:
      return scaled ? &reduce_arrays<E, Sum<E>, true> : &reduce_arrays<E, Sum<E>, false>;
    case Op::kMin:
      return scaled ? &reduce_arrays<E, Min<E>, true> : &reduce_arrays<E, Min<E>, false>;
    case Op::kMax:
      return scaled ? &reduce_arrays<E, Max<E>, true> : &reduce_arrays<E, Max<E>, false>;
    case Op::kProduct:
      return scaled ? &reduce_arrays<E, Product<E>, true> : &reduce_arrays<E, Product<E>, false>;
  }
  return nullptr;
}

inline ReduceKernel find_kernel(DType dtype, Op op, bool scaled) {
  switch (dtype) {
    case DType::kUint8:
      return find_kernel_of<std::uint8_t>(op, scaled);
    case DType::kInt8:
      return find_kernel_of<std::int8_t>(op, scaled);
    case DType::kInt16:
      return find_kernel_of<std::int16_t>(op, scaled);
    case DType::kInt32:
      return find_kernel_of<std::int32_t>(op, scaled);
    case DType::kInt64:
      return find_kernel_of<std::int64_t>(op, scaled);
    case DType::kFloat16:
      return find_kernel_of<Float16>(op, scaled);
    case DType::kBfloat16:
      return find_kernel_of<Bfloat16>(op, scaled);
    case DType::kFloat32:
      return find_kernel_of<float>(op, scaled);
    case DType::kFloat64:
      return find_kernel_of<double>(op, scaled);
    case DType::kBool:
      return nullptr;
  }
  return nullptr;
}
