// A reduce-scatter of few bytes that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "elements.h"
#include "pack.h"
#include "prepared_in_node.h"
#include "small_allreduce.h"

namespace hvdlite {

// One tensor, of which this rank wants a part.
struct ReduceScatterShape {
  std::uint64_t numel;
  SmallAllreduce::Part wanted;
  DType dtype;       // of the tensor
  DType wire_dtype;  // in which it travels
  Op op;
  double prescale;
  double postscale;
};

class PreparedReduceScatter : public PreparedInNode {
 public:
  // `small` and `counts` have to live as long.
  PreparedReduceScatter(SmallAllreduce& small, ReadyCounts& counts, ReduceScatterShape shape, Patience patience);

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override;

 private:
  TensorReduction job() const;

  SmallAllreduce& small_;
  ReduceScatterShape shape_;
  TensorList input_;
  TensorList output_;
};

}  // namespace hvdlite
