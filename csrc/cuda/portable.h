// One source of kernels for nvcc and NVRTC, and for g++, where a GPU thread is a call of a function.
#pragma once

#include "parameters.h"

namespace hvdlite::kernels {

struct GpuThread {
  unsigned index;  // in its block
  unsigned block;
  unsigned threads;  // of a block
  unsigned blocks;
};

}  // namespace hvdlite::kernels

#ifdef __CUDACC__

#define HVDLITE_KERNEL(name, Parameters)                                        \
  extern "C" __global__ void __launch_bounds__(hvdlite::kernels::kBlockThreads) \
      name(const __grid_constant__ Parameters p)
#define HVDLITE_DEVICE __device__ __forceinline__
#define HVDLITE_DEVICE_FUNCTION __device__ __noinline__
#define HVDLITE_UNROLL _Pragma("unroll 4")

namespace hvdlite::kernels {

using Raw16 = uint4;
using Raw8 = unsigned long long;
using Raw4 = unsigned;
using Raw2 = unsigned short;
using Raw1 = unsigned char;

HVDLITE_DEVICE GpuThread this_thread() { return {threadIdx.x, blockIdx.x, blockDim.x, gridDim.x}; }
HVDLITE_DEVICE void before_access() {}
HVDLITE_DEVICE unsigned bits_of(float value) { return __float_as_uint(value); }
HVDLITE_DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }

// By the instructions for it: done with bits, fp16 would take more time than the memory.
HVDLITE_DEVICE float widened_half(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
HVDLITE_DEVICE unsigned short narrowed_half(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

}  // namespace hvdlite::kernels

#else

#include <cstring>

#define HVDLITE_KERNEL(name, Parameters) inline void name(const Parameters& p)
#define HVDLITE_DEVICE inline
#define HVDLITE_DEVICE_FUNCTION inline
#define HVDLITE_UNROLL

namespace hvdlite::kernels {

struct __attribute__((may_alias, aligned(16))) Raw16 {
  unsigned words[4];
};
using Raw8 __attribute__((may_alias)) = unsigned long long;
using Raw4 __attribute__((may_alias)) = unsigned;
using Raw2 __attribute__((may_alias)) = unsigned short;
using Raw1 = unsigned char;

// Of whoever calls kernels.
GpuThread this_thread();
void before_access();  // other threads may go on here

// Where the memory of every GPU at a multicast address is, in the order in which it is added up.
struct Bound {
  unsigned count;
  Address copies[kMaxArrays];
};
Bound bound_to(Address multicast);

inline unsigned bits_of(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr unsigned kSmallestNormalHalf = 113u << 23;  // 2^-14 in fp32

inline float widened_half(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16, exponent = half & 0x7c00u, magnitude = (half & 0x7fffu) << 13;
  if (exponent == 0x7c00) return float_of(sign | (magnitude + (224u << 23)));
  if (exponent != 0) return float_of(sign | (magnitude + (112u << 23)));
  const float subnormal = float_of(magnitude + kSmallestNormalHalf) - float_of(kSmallestNormalHalf);
  return float_of(sign | bits_of(subnormal));
}

inline unsigned short narrowed_half(float value) {
  const unsigned sign = bits_of(value) & 0x80000000u, bits = bits_of(value) ^ sign;
  constexpr unsigned kInfinity = 255u << 23, kTooLarge = 143u << 23, kOneHalf = 126u << 23;
  unsigned half;
  if (bits > kInfinity) {
    half = 0x7e00 | ((bits >> 13) & 0x3ff);
  } else if (bits >= kTooLarge) {
    half = 0x7c00;
  } else if (bits >= kSmallestNormalHalf) {
    half = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  } else {  // adding 0.5 moves a subnormal half to the last bits of the fp32, rounded by the adder
    half = bits_of(float_of(bits) + float_of(kOneHalf)) - kOneHalf;
  }
  return static_cast<unsigned short>(half | (sign >> 16));
}

}  // namespace hvdlite::kernels

#endif
