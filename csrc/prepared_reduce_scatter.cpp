#include "prepared_reduce_scatter.h"

namespace hvdlite {

PreparedReduceScatter::PreparedReduceScatter(SmallAllreduce& small, ReadyCounts& counts, ReduceScatterShape shape,
                                             Patience patience)
    : PreparedInNode(counts, &small.places(), patience),
      small_(small),
      shape_(shape),
      input_({0}, {shape.numel}, {0}),
      output_({0}, {shape.wanted.end - shape.wanted.begin}, {shape.wanted.begin}) {}

void PreparedReduceScatter::begin(const std::vector<std::uintptr_t>& inputs,
                                  const std::vector<std::uintptr_t>& outputs) {
  input_.move_to(inputs);
  output_.move_to(outputs);
  small_.begin(job());
}

PreparedReduceScatter::Result PreparedReduceScatter::finish() {
  return result_of(small_.run(job(), shape_.wanted, patience_.timeout_s));
}

TensorReduction PreparedReduceScatter::job() const {
  return {input_, output_, shape_.numel, shape_.dtype, shape_.wire_dtype, shape_.op, shape_.prescale, shape_.postscale};
}

}  // namespace hvdlite
