// An allreduce that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/elements.h"
#include "kernels/pack.h"
#include "node/small_allreduce.h"
#include "prepared/prepared_in_node.h"

namespace hvdlite {

// What is the same every time. Tensors lie in the layout as `numels` and `offsets` say, and are reduced by way of
// windows; at their home; or, where there are so few bytes, as SmallAllreduce does it.
struct AllreduceShape {
  std::vector<std::uint64_t> numels;
  std::vector<std::uint64_t> offsets;
  std::uint64_t numel;                 // of the layout
  std::vector<std::uintptr_t> memory;  // shared: per rank the windows that tensors pass through, or their home
  std::uint64_t window_numel;          // 0: the tensors' home
  DType dtype;                         // of the tensors
  DType wire_dtype;                    // in which they travel
  Op op;
  double prescale;
  double postscale;
};

class PreparedAllreduce : public PreparedInNode {
 public:
  // `barrier`, `small` and `counts` have to live as long.
  PreparedAllreduce(Barrier& barrier, SmallAllreduce& small, ReadyCounts& counts, AllreduceShape shape,
                    Patience patience);

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override { return result_of(reduce()); }

 private:
  static bool is_small(const AllreduceShape& shape, const SmallAllreduce& small);
  TensorReduction job() const;
  WaitStatus reduce();

  Barrier& barrier_;
  SmallAllreduce& small_;
  AllreduceShape shape_;
  TensorList inputs_;
  TensorList outputs_;
  bool is_small_;
};

}  // namespace hvdlite
