// The cast kernels of one instruction set; see for_each_instruction_set.h.

// fp32 in the order of memory, from and to the order in which Lanes<E> hold 16-bit elements.
template <std::size_t... i>
inline void to_memory_order(Floats (&v)[2], std::index_sequence<i...>) {
  constexpr std::size_t kCount = sizeof...(i);
  const Floats even = v[0], odd = v[1];
  v[0] = HVDLITE_SHUFFLE(even, odd, (i / 2 + i % 2 * kCount)...);
  v[1] = HVDLITE_SHUFFLE(even, odd, ((kCount + i) / 2 + i % 2 * kCount)...);
}
template <std::size_t... i>
inline void from_memory_order(Floats (&v)[2], std::index_sequence<i...>) {
  const Floats first = v[0], second = v[1];
  v[0] = HVDLITE_SHUFFLE(first, second, (2 * i)...);
  v[1] = HVDLITE_SHUFFLE(first, second, (2 * i + 1)...);
}
using LaneIndices = std::make_index_sequence<kVectorBytes / sizeof(float)>;

template <class E>
inline void read_vector(float* values, const char* elements) {
  using L = Lanes<E>;
  Floats parts[L::kParts];
  L::widen(load_unaligned<typename L::Packed>(elements), parts);
  if constexpr (L::kParts == 2) to_memory_order(parts, LaneIndices());
  __builtin_memcpy(values, parts, sizeof parts);
}

template <class E>
inline void write_vector(char* elements, const float* values) {
  using L = Lanes<E>;
  Floats parts[L::kParts];
  __builtin_memcpy(parts, values, sizeof parts);
  if constexpr (std::is_same<E, Bfloat16>::value) {
    for (Floats& part : parts) part = L::trim_nan(part);
  }
  if constexpr (L::kParts == 2) from_memory_order(parts, LaneIndices());
  store_unaligned(elements, L::narrow(parts));
}

// `count` elements to fp32 and back. The last few take the same instructions as all others, padded.
template <class E>
void read_floats(float* values, const char* source, std::size_t count) {
  if constexpr (std::is_same<E, float>::value) {
    __builtin_memcpy(values, source, count * sizeof(float));
  } else {
    constexpr std::size_t kStep = sizeof(typename Lanes<E>::Packed) / sizeof(E);
    std::size_t i = 0;
    for (; count - i >= kStep; i += kStep) read_vector<E>(values + i, source + i * sizeof(E));
    if (i == count) return;
    char elements[kStep * sizeof(E)] = {};
    float last[kStep];
    __builtin_memcpy(elements, source + i * sizeof(E), (count - i) * sizeof(E));
    read_vector<E>(last, elements);
    __builtin_memcpy(values + i, last, (count - i) * sizeof(float));
  }
}

template <class E>
void write_floats(char* destination, const float* values, std::size_t count) {
  if constexpr (std::is_same<E, float>::value) {
    __builtin_memcpy(destination, values, count * sizeof(float));
  } else {
    constexpr std::size_t kStep = sizeof(typename Lanes<E>::Packed) / sizeof(E);
    std::size_t i = 0;
    for (; count - i >= kStep; i += kStep) write_vector<E>(destination + i * sizeof(E), values + i);
    if (i == count) return;
    float last[kStep] = {};
    char elements[kStep * sizeof(E)];
    __builtin_memcpy(last, values + i, (count - i) * sizeof(float));
    write_vector<E>(elements, last);
    __builtin_memcpy(destination + i * sizeof(E), elements, (count - i) * sizeof(E));
  }
}

// fp32 rounded to odd: what it loses stays visible in its last bit, so that rounding it once more, to 16 bits, gives
// what one rounding would have given (Boldo & Melquiond 2008, doi:10.1109/TC.2007.70819).
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  std::uint32_t bits;
  __builtin_memcpy(&bits, &nearest, sizeof bits);
  const bool too_far = __builtin_fabs(back) > __builtin_fabs(value);
  const bool inexact = back != value && value == value;
  bits = (bits - (too_far ? 1 : 0)) | (inexact ? 1 : 0);
  float odd;
  __builtin_memcpy(&odd, &bits, sizeof odd);
  return odd;
}

constexpr std::size_t kBlock =
    1024;  // elements on their way, in the L1 cache; no more are ever read or written at once

template <class E>
void read_doubles(double* values, const char* source, std::size_t count) {
  if constexpr (std::is_same<E, double>::value) {
    __builtin_memcpy(values, source, count * sizeof(double));
  } else {
    float singles[kBlock];
    read_floats<E>(singles, source, count);
    for (std::size_t i = 0; i < count; ++i) values[i] = singles[i];
  }
}

template <class E>
void write_doubles(char* destination, const double* values, std::size_t count) {
  if constexpr (std::is_same<E, double>::value) {
    __builtin_memcpy(destination, values, count * sizeof(double));
  } else {
    float singles[kBlock];
    constexpr bool kRoundsAgain = sizeof(E) < sizeof(float);
    for (std::size_t i = 0; i < count; ++i) {
      singles[i] = kRoundsAgain ? round_to_odd(values[i]) : static_cast<float>(values[i]);
    }
    write_floats<E>(destination, singles, count);
  }
}

// Through fp32, or through fp64 where either side is fp64; either way the result is rounded once.
template <class From, class To>
void cast_array(char* destination, const char* source, std::uint64_t numel, double factor) {
  constexpr bool kInDouble = std::is_same<From, double>::value || std::is_same<To, double>::value;
  using Value = std::conditional_t<kInDouble, double, float>;
  Value values[kBlock];
  for (std::uint64_t at = 0; at < numel; at += kBlock) {
    const std::size_t count = numel - at < kBlock ? numel - at : kBlock;
    const char* from = source + at * sizeof(From);
    char* to = destination + at * sizeof(To);
    if constexpr (kInDouble) {
      read_doubles<From>(values, from, count);
    } else {
      read_floats<From>(values, from, count);
    }
    for (std::size_t i = 0; i < count; ++i) values[i] *= static_cast<Value>(factor);
    if constexpr (kInDouble) {
      write_doubles<To>(to, values, count);
    } else {
      write_floats<To>(to, values, count);
    }
  }
}

template <class Integer>
void scale_integers(char* destination, const char* source, std::uint64_t numel, double factor) {
  for (std::uint64_t i = 0; i < numel; ++i) {
    Integer value;
    __builtin_memcpy(&value, source + i * sizeof value, sizeof value);
    value = scaled_integer(value, factor);
    __builtin_memcpy(destination + i * sizeof value, &value, sizeof value);
  }
}

template <class From>
CastKernel find_kernel_from(DType to) {
  switch (to) {
    case DType::kFloat16:
      return &cast_array<From, Float16>;
    case DType::kBfloat16:
      return &cast_array<From, Bfloat16>;
    case DType::kFloat32:
      return &cast_array<From, float>;
    case DType::kFloat64:
      return &cast_array<From, double>;
    default:
      return nullptr;
  }
}

inline CastKernel find_kernel(DType from, DType to) {
  switch (from) {
    case DType::kFloat16:
      return find_kernel_from<Float16>(to);
    case DType::kBfloat16:
      return find_kernel_from<Bfloat16>(to);
    case DType::kFloat32:
      return find_kernel_from<float>(to);
    case DType::kFloat64:
      return find_kernel_from<double>(to);
    default:
      break;
  }
  if (from != to) return nullptr;
  switch (from) {
    case DType::kUint8:
      return &scale_integers<std::uint8_t>;
    case DType::kInt8:
      return &scale_integers<std::int8_t>;
    case DType::kInt16:
      return &scale_integers<std::int16_t>;
    case DType::kInt32:
      return &scale_integers<std::int32_t>;
    case DType::kInt64:
      return &scale_integers<std::int64_t>;
    default:
      return nullptr;
  }
}
