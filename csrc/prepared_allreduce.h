// An allreduce that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "direct_call.h"
#include "elements.h"
#include "pack.h"
#include "ready_counts.h"
#include "signal.h"
#include "small_allreduce.h"

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

class PreparedAllreduce : public DirectCall {
 public:
  // `barrier`, `small` and `counts` have to live as long. `timeout_s`: the longest wait inside of the allreduce.
  // `patience_s`: the longest wait for all ranks to be ready, of which `spin` without sleep.
  PreparedAllreduce(Barrier& barrier, SmallAllreduce& small, ReadyCounts& counts, AllreduceShape shape,
                    std::chrono::microseconds spin, double patience_s, double timeout_s);

  // Never kBegun. For `heard` and kDoneAndRung see ReadyCounts::await.
  Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count, std::uint32_t heard) override;

  // When all ranks were ready for the last that was done.
  Clock::time_point ready() const { return ready_; }

 private:
  ReadyCounts::Outcome await(std::uint64_t plan, std::uint64_t count, std::uint32_t heard);
  WaitStatus reduce();
  TensorReduction job() const;

  Barrier& barrier_;
  SmallAllreduce& small_;
  ReadyCounts& counts_;
  AllreduceShape shape_;
  TensorList inputs_;
  TensorList outputs_;
  std::chrono::microseconds spin_;
  double patience_s_;
  double timeout_s_;
  bool is_small_;
  Clock::time_point ready_{};
};

}  // namespace hvdlite
