// What is reduced over ranks: tensors as they lie in a layout, and how.
#pragma once

#include <cstdint>

#include "kernels/elements.h"
#include "kernels/pack.h"

namespace hvdlite {

struct TensorReduction {
  const TensorList& inputs;
  const TensorList& outputs;  // may be the same memory
  std::uint64_t numel;        // of the layout
  DType dtype;                // of the tensors
  DType wire_dtype;           // in which they travel
  Op op;
  double prescale;
  double postscale;
};

}  // namespace hvdlite
