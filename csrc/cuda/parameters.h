// The kernels by name, and what each is given. For their source and for whoever launches them; no includes, since the
// compiler at run time has no headers.
#pragma once

namespace hvdlite::kernels {

using Address = unsigned long long;
using Count = unsigned long long;

constexpr unsigned kBlockThreads = 256;
constexpr unsigned kVectorBytes = 16;  // the most that one thread moves at once
constexpr unsigned kMostReduced = 8;   // elements that a thread reduces at once: more would be long code for int8 only
constexpr Count kTileNumel = 4096;     // of a fusion buffer, for a block at a time: what balances tensors of all sizes
constexpr unsigned kTableTensors = 160;
constexpr unsigned kMaxArrays = 64;

// Bytes: the one at address A becomes byte A % 8 of `pattern`.
struct Fill {
  Address address;
  Count nbytes;
  Count pattern;
};

enum Combining : unsigned { kSum = 1, kMin = 3, kMax = 4, kProduct = 5 };  // as Op in elements.h

struct Reduce {
  Count numel;
  Count head;  // elements up to the first at which all arrays are aligned to groups; numel where there is none
  double prescale;
  double postscale;
  double divisor;  // to divide by instead of multiplying with postscale; 0 where there is none
  unsigned scaled;
  Combining op;
  unsigned source_count;
  unsigned destination_count;
  Address sources[kMaxArrays];
  Address destinations[kMaxArrays];
};

// Elements [begin, end) of a fused layout are those of a tensor; address 0: of none, but zeros.
struct PlacedTensor {
  Address address;
  Count begin;
  Count end;
};

// Elements [begin, end) of a fused layout, and the tensors with elements there, in order.
struct Tensors {
  Address buffer;  // of element `begin`
  Count begin;
  Count end;
  unsigned count;
  PlacedTensor tensors[kTableTensors];
};
static_assert(sizeof(Tensors) <= 4096, "what a launch takes by value on every GPU");

// Whole vectors from `source` to the memory of all GPUs that is at `multicast`.
struct MulticastStore {
  Address multicast;
  Address source;
  Count vectors;
};

// Whole vectors at `multicast`, added up over all GPUs, to `destination`; 0: back to the memory of all of them.
struct MulticastSum {
  Address multicast;
  Address destination;
  Count vectors;
};

// from and to: names of elements and their types in the source.
#define HVDLITE_CASTS(F)                  \
  F(float16, Float16, bfloat16, Bfloat16) \
  F(float16, Float16, float32, float)     \
  F(float16, Float16, float64, double)    \
  F(bfloat16, Bfloat16, float16, Float16) \
  F(bfloat16, Bfloat16, float32, float)   \
  F(bfloat16, Bfloat16, float64, double)  \
  F(float32, float, float16, Float16)     \
  F(float32, float, bfloat16, Bfloat16)   \
  F(float32, float, float64, double)      \
  F(float64, double, float16, Float16)    \
  F(float64, double, bfloat16, Bfloat16)  \
  F(float64, double, float32, float)

// Bytes of elements that are copied, and a type of that size.
#define HVDLITE_COPIES(F) \
  F(1, unsigned char)     \
  F(2, unsigned short)    \
  F(4, unsigned)          \
  F(8, unsigned long long)

#define HVDLITE_REDUCED(F) \
  F(uint8, unsigned char)  \
  F(int8, signed char)     \
  F(int16, short)          \
  F(int32, int)            \
  F(int64, long long)      \
  F(float16, Float16)      \
  F(bfloat16, Bfloat16)    \
  F(float32, float)        \
  F(float64, double)

// Those that multicast adds up.
#define HVDLITE_ADDED_BY_MULTICAST(F) \
  F(float16, Float16)                 \
  F(bfloat16, Bfloat16)               \
  F(float32, float)                   \
  F(float64, double)

}  // namespace hvdlite::kernels
