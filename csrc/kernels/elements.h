// Element types and reductions; the numbers are those of hvdlite/dtypes.py and of the wire.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace hvdlite {

enum class DType : int {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kBfloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,
};

enum class Op : int { kSum = 1, kMin = 3, kMax = 4, kProduct = 5 };

// Storage only: arithmetic on 16-bit floats happens in fp32.
struct Float16 {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};

constexpr std::size_t kCacheLine = 64;

inline std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  throw std::invalid_argument("unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"uint8",   "int8",     "int16",   "int32",   "int64",
                                    "float16", "bfloat16", "float32", "float64", "bool"};
  return kNames[static_cast<int>(dtype)];
}

inline bool is_floating(DType dtype) { return dtype >= DType::kFloat16 && dtype <= DType::kFloat64; }

}  // namespace hvdlite
