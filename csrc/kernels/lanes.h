// Vectors of elements: loading, storing, and the way between 16-bit floats and fp32.
//
// Included by for_each_instruction_set.h once per instruction set, inside its namespace; so no include guard and no
// includes. Vectors are the compiler's own (GCC and Clang), hence one source for every width and processor.

constexpr std::size_t kVectorBytes = HVDLITE_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Words = Vector<std::uint32_t>;
using Integers = Vector<std::int32_t>;
using Floats = Vector<float>;

template <class V>
inline V load_unaligned(const void* address) {
  V value;
  __builtin_memcpy(&value, address, sizeof value);
  return value;
}

template <class V>
inline void store_unaligned(void* address, V value) {
  __builtin_memcpy(address, &value, sizeof value);
}

// Lanes<E>: how elements of type E become values for arithmetic, and elements again.
//   Packed    one register of elements as they are in memory
//   Value     what arithmetic happens on: a vector of E, or of fp32 for 16-bit floats
//   Wrapping  Value for sums and products; unsigned for integers, whose overflow then wraps and is defined
//   kParts    values per Packed; where it is 2, the first holds the even elements and the second the odd ones
template <class E>
struct Lanes {
  using Scalar = E;
  using Packed = Vector<E>;
  using Value = Vector<E>;
  static constexpr std::size_t kParts = 1;

  template <class T, bool kInteger>
  struct WrappingOf {
    using type = Vector<std::make_unsigned_t<T>>;
  };
  template <class T>
  struct WrappingOf<T, false> {
    using type = Vector<T>;
  };
  using Wrapping = typename WrappingOf<E, std::is_integral<E>::value>::type;

  static void widen(Packed elements, Value (&values)[1]) { values[0] = elements; }
  static Packed narrow(const Value (&values)[1]) { return values[0]; }
};

struct HalfLanes {
  using Scalar = float;
  using Value = Floats;
  using Wrapping = Floats;
};

// Parting even and odd elements takes a shift and a mask, and no shuffle.
template <>
struct Lanes<Bfloat16> : HalfLanes {
  using Packed = Words;
  static constexpr std::size_t kParts = 2;

  static void widen(Words elements, Floats (&values)[2]) {
    values[0] = (Floats)(elements << 16);
    values[1] = (Floats)(elements & 0xffff0000u);
  }

  // Rounding may carry a NaN into infinity or beyond, but not one with 16 zeros at its end: those of widened bf16, and
  // what arithmetic makes of them. Others go through trim_nan first.
  static Words narrow(const Floats (&values)[2]) { return (round(values[0]) >> 16) | (round(values[1]) & 0xffff0000u); }
  static Words round(Floats value) {
    const Words bits = (Words)value;
    return bits + 0x7fff + ((bits >> 16) & 1);
  }
  static Floats trim_nan(Floats value) {
    const Words quiet_nan = ((Words)value & 0xffff0000u) | 0x400000u;
    return (Floats)(value != value ? quiet_nan : (Words)value);
  }
};

template <>
struct Lanes<Float16> : HalfLanes {
#if HVDLITE_VECTOR_BYTES == 64
  using Packed = __m256i;
  static constexpr std::size_t kParts = 1;

  // The zero-masked forms with every lane on: GCC 12 warns about the undefined register inside the unmasked ones.
  static void widen(__m256i elements, Floats (&values)[1]) { values[0] = _mm512_maskz_cvtph_ps(0xffff, elements); }
  static __m256i narrow(const Floats (&values)[1]) {
    return _mm512_maskz_cvtps_ph(0xffff, values[0], _MM_FROUND_TO_NEAREST_INT);
  }
#elif HVDLITE_VECTOR_BYTES == 32
  using Packed = __m128i;
  static constexpr std::size_t kParts = 1;

  static void widen(__m128i elements, Floats (&values)[1]) { values[0] = _mm256_cvtph_ps(elements); }
  static __m128i narrow(const Floats (&values)[1]) { return _mm256_cvtps_ph(values[0], _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
  using Packed = float16x4_t;
  static constexpr std::size_t kParts = 1;

  static void widen(float16x4_t elements, Floats (&values)[1]) { values[0] = (Floats)vcvt_f32_f16(elements); }
  static float16x4_t narrow(const Floats (&values)[1]) { return vcvt_f16_f32((float32x4_t)values[0]); }
#else
  using Packed = Words;
  static constexpr std::size_t kParts = 2;

  static void widen(Words elements, Floats (&values)[2]) {
    values[0] = widen_words(elements & 0xffff);
    values[1] = widen_words(elements >> 16);
  }
  static Words narrow(const Floats (&values)[2]) { return narrow_words(values[0]) | (narrow_words(values[1]) << 16); }

  // Words that hold a half each. Comparisons are signed, which SSE2 has, unlike unsigned ones.
  static Floats widen_words(Words half) {
    constexpr std::uint32_t kSmallestNormal = 113u << 23;  // 2^-14 in fp32
    const Words magnitude = (half & 0x7fff) << 13;
    const Integers exponent = (Integers)(half & 0x7c00);
    const Words normal = magnitude + (112u << 23);
    const Words special = magnitude + (224u << 23);
    const Floats subnormal = (Floats)(magnitude + kSmallestNormal) - (Floats)(Words{} + kSmallestNormal);
    const Words bits = exponent == 0x7c00 ? special : exponent == 0 ? (Words)subnormal : normal;
    return (Floats)(bits | ((half & 0x8000) << 16));
  }

  static Words narrow_words(Floats value) {
    constexpr std::int32_t kInfinity = 255 << 23, kTooLarge = 143 << 23, kSmallestNormal = 113 << 23;
    const Words sign = (Words)value & 0x80000000u;
    const Words bits = (Words)value ^ sign;
    const Words nan = 0x7e00 | ((bits >> 13) & 0x3ff);
    const Words infinity = Words{} + 0x7c00;
    const Words normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    // Adding 0.5 moves a subnormal half to the last bits of the fp32, rounded by the adder.
    const Words one_half = Words{} + (126u << 23);
    const Words subnormal = (Words)((Floats)bits + (Floats)one_half) - one_half;
    const Integers order = (Integers)bits;
    const Words large = order > kInfinity ? nan : infinity;
    return (order >= kTooLarge ? large : order < kSmallestNormal ? subnormal : normal) | (sign >> 16);
  }
#endif
};
