// Compiles the kernels in HVDLITE_KERNELS once per instruction set, each into a namespace of its own.
//
// No include guard: reduce.cpp and pack.cpp include it, each with its own kernels. A target pragma marks every
// function between push and pop, so one file and one set of compiler flags give all paths. What the kernels use
// from headers must have been included before, or it would be compiled for AVX-512, too.
//
// Inside: HVDLITE_VECTOR_BYTES, the width of a vector, and HVDLITE_SHUFFLE(a, b, indices...) of two vectors of fp32.

#include "kernels/instruction_set.h"

#if HVDLITE_X86
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define HVDLITE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HVDLITE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

namespace hvdlite {
namespace {

namespace plain {
#define HVDLITE_VECTOR_BYTES 16
#include "kernels/lanes.h"
#include HVDLITE_KERNELS
#undef HVDLITE_VECTOR_BYTES
}  // namespace plain

#if HVDLITE_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#define HVDLITE_VECTOR_BYTES 32
#include "kernels/lanes.h"
#include HVDLITE_KERNELS
#undef HVDLITE_VECTOR_BYTES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace avx512 {
#define HVDLITE_VECTOR_BYTES 64
#include "kernels/lanes.h"
#include HVDLITE_KERNELS
#undef HVDLITE_VECTOR_BYTES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // HVDLITE_X86

}  // namespace
}  // namespace hvdlite
