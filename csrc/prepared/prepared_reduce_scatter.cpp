#include "prepared/prepared_reduce_scatter.h"

#include <numeric>
#include <stdexcept>
#include <utility>

#include "kernels/reduce.h"

namespace hvdlite {
namespace {

std::uint64_t sum(const std::vector<std::uint64_t>& numels, std::size_t count) {
  return std::accumulate(numels.begin(), numels.begin() + static_cast<std::ptrdiff_t>(count), std::uint64_t{0});
}

}  // namespace

PreparedReduceScatter::PreparedReduceScatter(SmallAllreduce& small, Windows windows, ReadyCounts& counts,
                                             ReduceScatterShape shape, Patience patience)
    : PreparedInNode(counts, is_small(shape, small) ? &small.places() : nullptr, patience),
      small_(small),
      windows_(windows),
      shape_(std::move(shape)),
      numel_(sum(shape_.numels, shape_.numels.size())),
      wanted_{sum(shape_.numels, small.places().rank()), sum(shape_.numels, small.places().rank() + 1)},
      input_({0}, {numel_}, {0}),
      output_({0}, {wanted_.end - wanted_.begin}, {wanted_.begin}),
      is_small_(is_small(shape_, small)) {
  if (!is_small_ && shape_.dtype != shape_.wire_dtype) {
    throw std::invalid_argument("PreparedReduceScatter: so much travels as it is");
  }
}

bool PreparedReduceScatter::is_small(const ReduceScatterShape& shape, const SmallAllreduce& small) {
  return sum(shape.numels, shape.numels.size()) * item_bytes(shape.wire_dtype) <= small.most_bytes();
}

void PreparedReduceScatter::begin(const std::vector<std::uintptr_t>& inputs,
                                  const std::vector<std::uintptr_t>& outputs) {
  input_.move_to(inputs);
  output_.move_to(outputs);
  if (is_small_) small_.begin(job());
}

PreparedReduceScatter::Result PreparedReduceScatter::finish() {
  return is_small_ ? result_of(small_.run(job(), wanted_, patience_.timeout_s)) : result_of(exchange());
}

TensorReduction PreparedReduceScatter::job() const {
  return {input_, output_, numel_, shape_.dtype, shape_.wire_dtype, shape_.op, shape_.prescale, shape_.postscale};
}

OrderedExchange::Result PreparedReduceScatter::exchange() const {
  std::vector<std::uintptr_t> parts;
  std::uintptr_t at = input_.address(0);
  for (const std::uint64_t numel : shape_.numels) {
    parts.push_back(at);
    at += numel * item_bytes(shape_.dtype);
  }
  const Reducer reducer(shape_.dtype, shape_.op, shape_.prescale, shape_.postscale);
  return windows_.exchange.reduce_scatter(windows_.card, parts, shape_.numels, output_.address(0), shape_.dtype,
                                          reducer, patience_.timeout_s);
}

}  // namespace hvdlite
