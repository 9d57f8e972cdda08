#include "prepared/prepared_in_node.h"

#include <algorithm>

#include "waiting/spin.h"

namespace hvdlite {

PreparedInNode::Result PreparedInNode::run(const std::vector<std::uintptr_t>& inputs,
                                           const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
                                           std::uint64_t count, std::uint32_t heard) {
  start(inputs, outputs, plan, count);
  return complete(heard);
}

void PreparedInNode::start(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs,
                           std::uint64_t plan, std::uint64_t count) {
  begin(inputs, outputs);
  last_ = {plan, count, Result::kNotYet};
  ready_ = {};
  counts_.want_ring(false);
  counts_.set(plan, count);
}

PreparedInNode::Result PreparedInNode::complete(std::uint32_t heard) { return finish_as(await(heard)); }

bool PreparedInNode::is_ready(std::chrono::microseconds moment) const {
  return places_->all_have_begun() ||
         (moment.count() > 0 && spin_until(Clock::now() + moment, [&] { return places_->all_have_begun(); }));
}

// A ring is wanted before the last look: either it sees the last rank, or that sees that it has to ring.
PreparedInNode::Result PreparedInNode::complete_now() {
  bool all_are_ready = is_ready(kMoment);
  if (!all_are_ready) {
    counts_.want_ring(true);
    all_are_ready = counts_.all(last_.plan) >= last_.count;
  }
  return finish_as(all_are_ready ? ReadyCounts::Outcome::kAllReady : ReadyCounts::Outcome::kNotYet);
}

PreparedInNode::Result PreparedInNode::finish_as(ReadyCounts::Outcome ready) {
  if (ready == ReadyCounts::Outcome::kNotYet) return Result::kNotYet;
  ready_ = Clock::now();
  last_.result = Result::kAborted;  // unless it comes to an end
  last_.result = finish();
  if (last_.result == Result::kDone && ready == ReadyCounts::Outcome::kAllReadyAndRung) {
    last_.result = Result::kDoneAndRung;
  }
  return last_.result;
}

ReadyCounts::Outcome PreparedInNode::await(std::uint32_t heard) {
  const auto until = time_after(patience_.patience_s);
  const auto [plan, count, result] = last_;
  if (places_ == nullptr) return counts_.await(plan, count, heard, until, patience_.spin);
  // Whoever has begun has said that it is ready, or does so next, whatever comes (`start`). So once all have begun
  // there is nothing more to wait for; what they have written is seen by the counts of the places.
  const auto all_have_begun = [&] { return places_->all_have_begun(); };
  spin_until(std::min(Clock::now() + patience_.spin, until),
             [&] { return all_have_begun() || counts_.has_news(heard); });
  if (all_have_begun()) return ReadyCounts::Outcome::kAllReady;
  return counts_.await(plan, count, heard, until, std::chrono::microseconds(0));
}

PreparedInNode::Result PreparedInNode::result_of(OrderedExchange::Result result) {
  if (result == OrderedExchange::Result::kOk) return Result::kDone;
  return result == OrderedExchange::Result::kTimeout ? Result::kTimeout : Result::kAborted;
}

PreparedInNode::Result PreparedInNode::result_of(WaitStatus status) {
  if (status == WaitStatus::kOk) return Result::kDone;
  return status == WaitStatus::kTimeout ? Result::kTimeout : Result::kAborted;
}

}  // namespace hvdlite
