#include "prepared/prepared_allreduce.h"

#include <utility>

#include "node/staged_allreduce.h"

namespace hvdlite {

PreparedAllreduce::PreparedAllreduce(Barrier& barrier, SmallAllreduce& small, ReadyCounts& counts, AllreduceShape shape,
                                     Patience patience)
    : PreparedInNode(counts, is_small(shape, small) ? &small.places() : nullptr, patience),
      barrier_(barrier),
      small_(small),
      shape_(std::move(shape)),
      inputs_(std::vector<std::uintptr_t>(shape_.numels.size()), shape_.numels, shape_.offsets),
      outputs_(inputs_),
      is_small_(is_small(shape_, small)) {}

bool PreparedAllreduce::is_small(const AllreduceShape& shape, const SmallAllreduce& small) {
  const std::uint64_t most = shape.window_numel == 0 ? SmallAllreduce::kMostBytesAtHome : small.most_bytes();
  return shape.numel * item_bytes(shape.wire_dtype) <= most;
}

void PreparedAllreduce::begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) {
  inputs_.move_to(inputs);
  outputs_.move_to(outputs);
  if (is_small_) small_.begin(job());
}

TensorReduction PreparedAllreduce::job() const {
  return {inputs_,           outputs_,  shape_.numel,    shape_.dtype,
          shape_.wire_dtype, shape_.op, shape_.prescale, shape_.postscale};
}

WaitStatus PreparedAllreduce::reduce() {
  if (is_small_) return small_.run(job(), patience_.timeout_s);
  if (shape_.window_numel != 0) {
    return staged_allreduce(barrier_, {job(), shape_.memory, shape_.window_numel}, patience_.timeout_s);
  }
  const std::uintptr_t home = shape_.memory[barrier_.rank()];
  inputs_.pack(home, 0, shape_.numel, shape_.dtype, shape_.dtype, 1.0);
  const WaitStatus status = barrier_.allreduce(shape_.memory, shape_.numel, shape_.dtype, shape_.op, shape_.prescale,
                                               shape_.postscale, patience_.timeout_s);
  if (status == WaitStatus::kOk) outputs_.unpack(home, 0, shape_.numel, shape_.dtype, shape_.dtype, 1.0);
  return status;
}

}  // namespace hvdlite
