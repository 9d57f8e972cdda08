// An allreduce of few bytes between ranks that are nodes, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "bound_messages.h"
#include "elements.h"
#include "pack.h"
#include "polite_look.h"
#include "ready_counts.h"

namespace hvdlite {

// What is the same every time: tensors lie in the layout as `numels` and `offsets` say, and travel by way of `place`.
struct EarlyShape {
  std::vector<std::uint64_t> numels;
  std::vector<std::uint64_t> offsets;
  std::uint64_t numel;   // of the layout
  std::uintptr_t place;  // of so many elements of the type in which they travel
  DType dtype;           // of the tensors
  DType wire_dtype;
};

class EarlyAllreduce {
 public:
  // `counts` and `look` have to live as long.
  EarlyAllreduce(const ReadyCounts& counts, PoliteLook& look, EarlyShape shape);

  // Does it by `messages`, whose memory is that of the shape. kWaiting: they wait for a rank that is late, or this rank
  // was rung since it had counted `heard` rings; the rest, and to unpack, is the caller's.
  BoundMessages::Progress run(BoundMessages& messages, const std::vector<std::uintptr_t>& inputs,
                              const std::vector<std::uintptr_t>& outputs, std::uint32_t heard);

 private:
  const ReadyCounts& counts_;
  PoliteLook& look_;
  EarlyShape shape_;
  TensorList inputs_;
  TensorList outputs_;
};

}  // namespace hvdlite
