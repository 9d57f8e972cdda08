// A reduce-scatter that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/elements.h"
#include "kernels/pack.h"
#include "node/small_allreduce.h"
#include "prepared/prepared_in_node.h"

namespace hvdlite {

// One tensor, of which each rank wants so many elements, in the order of ranks.
struct ReduceScatterShape {
  std::vector<std::uint64_t> numels;
  DType dtype;       // of the tensor
  DType wire_dtype;  // in which it travels
  Op op;
  double prescale;
  double postscale;
};

class PreparedReduceScatter : public PreparedInNode {
 public:
  // `small`, `windows` and `counts` have to live as long. What is not small travels as it is.
  PreparedReduceScatter(SmallAllreduce& small, Windows windows, ReadyCounts& counts, ReduceScatterShape shape,
                        Patience patience);

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override;

 private:
  static bool is_small(const ReduceScatterShape& shape, const SmallAllreduce& small);
  TensorReduction job() const;
  OrderedExchange::Result exchange() const;

  SmallAllreduce& small_;
  Windows windows_;
  ReduceScatterShape shape_;
  std::uint64_t numel_;
  SmallAllreduce::Part wanted_;
  TensorList input_;
  TensorList output_;
  bool is_small_;
};

}  // namespace hvdlite
