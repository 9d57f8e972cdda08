#include "prepared_allreduce.h"

#include <algorithm>
#include <utility>

#include "spin.h"
#include "staged_allreduce.h"

namespace hvdlite {

PreparedAllreduce::PreparedAllreduce(Barrier& barrier, SmallAllreduce& small, ReadyCounts& counts, AllreduceShape shape,
                                     std::chrono::microseconds spin, double patience_s, double timeout_s)
    : barrier_(barrier),
      small_(small),
      counts_(counts),
      shape_(std::move(shape)),
      inputs_(std::vector<std::uintptr_t>(shape_.numels.size()), shape_.numels, shape_.offsets),
      outputs_(inputs_),
      spin_(spin),
      patience_s_(patience_s),
      timeout_s_(timeout_s),
      is_small_(shape_.numel * item_bytes(shape_.wire_dtype) <=
                (shape_.window_numel == 0 ? SmallAllreduce::kMostBytesAtHome : small.most_bytes())) {}

PreparedAllreduce::Result PreparedAllreduce::run(const std::vector<std::uintptr_t>& inputs,
                                                 const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
                                                 std::uint64_t count, std::uint32_t heard) {
  inputs_.move_to(inputs);
  outputs_.move_to(outputs);
  last_ = {plan, count, Result::kNotYet};
  ready_ = {};
  if (is_small_) small_.begin(job());
  counts_.want_ring(false);
  counts_.set(plan, count);
  const auto ready = await(plan, count, heard);
  if (ready == ReadyCounts::Outcome::kNotYet) return Result::kNotYet;
  ready_ = Clock::now();
  switch (reduce()) {
    case WaitStatus::kOk:
      last_.result = ready == ReadyCounts::Outcome::kAllReady ? Result::kDone : Result::kDoneAndRung;
      break;
    case WaitStatus::kTimeout:
      last_.result = Result::kTimeout;
      break;
    case WaitStatus::kAborted:
      last_.result = Result::kAborted;
      break;
  }
  return last_.result;
}

ReadyCounts::Outcome PreparedAllreduce::await(std::uint64_t plan, std::uint64_t count, std::uint32_t heard) {
  const auto until = time_after(patience_s_);
  if (!is_small_) return counts_.await(plan, count, heard, until, spin_);
  // Whoever has begun has said that it is ready, or does so next, whatever comes (`run`). So once all have begun there
  // is nothing more to wait for; what they have packed is seen by the counts of SmallAllreduce.
  const auto all_have_begun = [&] { return small_.all_have_begun(); };
  spin_until(std::min(Clock::now() + spin_, until), [&] { return all_have_begun() || counts_.has_news(heard); });
  if (all_have_begun()) return ReadyCounts::Outcome::kAllReady;
  return counts_.await(plan, count, heard, until, std::chrono::microseconds(0));
}

TensorReduction PreparedAllreduce::job() const {
  return {inputs_,           outputs_,  shape_.numel,    shape_.dtype,
          shape_.wire_dtype, shape_.op, shape_.prescale, shape_.postscale};
}

WaitStatus PreparedAllreduce::reduce() {
  if (is_small_) return small_.run(job(), timeout_s_);
  if (shape_.window_numel != 0) {
    return staged_allreduce(barrier_, {job(), shape_.memory, shape_.window_numel}, timeout_s_);
  }
  const std::uintptr_t home = shape_.memory[barrier_.rank()];
  inputs_.pack(home, 0, shape_.numel, shape_.dtype, shape_.dtype, 1.0);
  const WaitStatus status = barrier_.allreduce(shape_.memory, shape_.numel, shape_.dtype, shape_.op, shape_.prescale,
                                               shape_.postscale, timeout_s_);
  if (status == WaitStatus::kOk) outputs_.unpack(home, 0, shape_.numel, shape_.dtype, shape_.dtype, 1.0);
  return status;
}

}  // namespace hvdlite
