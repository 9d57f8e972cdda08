#include "node/small_allreduce.h"

#include <stdexcept>
#include <vector>

#include "kernels/ascending_copy.h"
#include "kernels/reduce.h"

namespace hvdlite {
namespace {

// Where one tensor has all of a part, as it travels; else 0.
std::uintptr_t where_one_has_all(const TensorList& tensors, const TensorReduction& job, SmallAllreduce::Part part) {
  return job.dtype == job.wire_dtype ? tensors.address_of(part.begin, part.end, item_bytes(job.wire_dtype)) : 0;
}

}  // namespace

SmallAllreduce::SmallAllreduce(PlacesInTurn& places) : places_(places), scratch_(new char[places.most_bytes()]) {}

WaitStatus SmallAllreduce::run(const TensorReduction& job, Part wanted, double timeout_s) {
  if (!places_.has_begun()) begin(job);
  const WaitStatus status = places_.await_all(timeout_s);
  if (status == WaitStatus::kOk) reduce(job, wanted);
  places_.end();
  return status;
}

void SmallAllreduce::begin(const TensorReduction& job) {
  const std::uint64_t bytes = job.numel * item_bytes(job.wire_dtype);
  if (bytes > most_bytes()) throw std::invalid_argument("SmallAllreduce: too many bytes");
  places_.begin();
  source_ = where_one_has_all(job.inputs, job, {0, job.numel});
  if (source_ == 0) {
    source_ = reinterpret_cast<std::uintptr_t>(scratch_.get());
    job.inputs.pack(source_, 0, job.numel, job.dtype, job.wire_dtype, 1.0);
  }
  ascending_copy(places_.place(places_.rank()), source_, bytes);
  places_.publish();
}

void SmallAllreduce::reduce(const TensorReduction& job, Part wanted) const {
  const Reducer reducer(job.wire_dtype, job.op, job.prescale, job.postscale);
  std::vector<std::uintptr_t> sources;
  for (std::uint32_t rank = 0; rank < places_.size(); ++rank) {
    sources.push_back(rank == places_.rank() ? source_ : places_.place(rank));
  }
  const auto [begin, end] = wanted;
  const std::uint64_t begin_bytes = begin * item_bytes(job.wire_dtype);
  const std::uintptr_t tensor = where_one_has_all(job.outputs, job, wanted);
  if (tensor != 0) {
    reducer.reduce({tensor - begin_bytes}, sources, begin, end);
  } else {
    const auto result = reinterpret_cast<std::uintptr_t>(scratch_.get());
    reducer.reduce({result}, sources, begin, end);
    job.outputs.unpack(result + begin_bytes, begin, end, job.wire_dtype, job.dtype, 1.0);
  }
}

}  // namespace hvdlite
