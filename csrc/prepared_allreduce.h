// An allreduce that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

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

class PreparedAllreduce {
 public:
  // `barrier`, `small` and `counts` have to live as long. `timeout_s`: the longest wait inside of the allreduce.
  // `patience_s`: the longest wait for all ranks to be ready, of which `spin` without sleep.
  PreparedAllreduce(Barrier& barrier, SmallAllreduce& small, ReadyCounts& counts, AllreduceShape shape,
                    std::chrono::microseconds spin, double patience_s, double timeout_s);

  enum class Result { kDone = 0, kNotYet = 1, kDoneAndRung = 2, kTimeout = 3, kAborted = 4 };

  // Of the last `run`: which operation of which plan it was for, how it ended, and when all ranks were ready.
  struct Last {
    std::uint64_t plan;
    std::uint64_t count;  // 0: there was none
    Result result;
    Clock::time_point ready;
  };

  // Says that this rank is ready for operation `count` of `plan`, counted from 1, and does it once all ranks are.
  // kNotYet: it was said, and nothing else was done. For `heard` and kDoneAndRung see ReadyCounts::await.
  Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count, std::uint32_t heard);
  const Last& last() const { return last_; }

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
  Last last_{};
};

}  // namespace hvdlite
