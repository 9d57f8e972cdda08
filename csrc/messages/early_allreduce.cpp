#include "messages/early_allreduce.h"

#include <algorithm>
#include <utility>

namespace hvdlite {
namespace {

// Of who waits for messages, of which nobody tells a sleeper: looks while the wait gets twice as long.
constexpr int kLooks = 8;
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{2000};

EarlyAllreduce::Progress of(BoundMessages::Progress progress) {
  return static_cast<EarlyAllreduce::Progress>(progress);
}

}  // namespace

EarlyAllreduce::EarlyAllreduce(ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape,
                               std::chrono::microseconds spin, double patience_s)
    : counts_(counts),
      turns_(turns),
      look_(look),
      shape_(std::move(shape)),
      other_places_(shape_.places.begin() + 1, shape_.places.end()),
      copy_(DType::kUint8, Op::kSum, 1.0, 1.0),
      inputs_(std::vector<std::uintptr_t>(shape_.numels.size()), shape_.numels, shape_.offsets),
      outputs_(inputs_),
      spin_(spin),
      patience_s_(patience_s) {}

DirectCall::Result EarlyAllreduce::run(const std::vector<std::uintptr_t>& inputs,
                                       const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
                                       std::uint64_t count, std::uint32_t heard) {
  inputs_.move_to(inputs);
  outputs_.move_to(outputs);
  heard_ = heard;
  last_ = {plan, count, Result::kNotYet};
  counts_.want_ring(false);
  counts_.set(plan, count);
  if (!node_is_ready()) return Result::kNotYet;

  last_.result = Result::kBegun;
  began_ = Clock::now();
  const std::uintptr_t place = shape_.places[shape_.rank];
  inputs_.pack(place, 0, shape_.numel, shape_.dtype, shape_.wire_dtype, 1.0);
  turns_.begin();
  progress_ = leads() ? Progress::kNodeIsLate : Progress::kWaiting;
  if (!look_.until([&] { return advance() || has_news(); })) {
    counts_.sleep_until([&] { return advance(); }, heard_, time_after(patience_s_), [&] { return next_look(); });
  }
  if (progress_ != Progress::kDone) return Result::kBegun;
  if (leads()) spread();
  outputs_.unpack(place, 0, shape_.numel, shape_.wire_dtype, shape_.dtype, 1.0);
  return last_.result = has_news() ? Result::kDoneAndRung : Result::kDone;
}

bool EarlyAllreduce::node_is_ready() const {
  if (shape_.places.size() == 1) return true;
  const auto until = time_after(patience_s_);
  return counts_.await(last_.plan, last_.count, heard_, until, spin_) != ReadyCounts::Outcome::kNotYet;
}

// Whether it has come to its end.
bool EarlyAllreduce::advance() {
  if (progress_ == Progress::kNodeIsLate) {
    progress_ = begin_exchange();
  } else if (leads()) {
    progress_ = of(messages_->advance());
  } else if (turns_.has_come()) {
    progress_ = Progress::kDone;
  }
  return progress_ == Progress::kDone || progress_ == Progress::kFailed;
}

Clock::time_point EarlyAllreduce::next_look() const {
  if (!leads() || progress_ == Progress::kNodeIsLate) return Clock::time_point::max();
  const auto now = Clock::now();
  return now + std::clamp<Clock::duration>((now - began_) / kLooks, kShortestNap, kLongestNap);
}

EarlyAllreduce::Progress EarlyAllreduce::begin_exchange() {
  if (!turns_.all_have_begun()) return Progress::kNodeIsLate;
  if (shape_.in_node) shape_.in_node->reduce({shape_.places.front()}, shape_.places, 0, shape_.numel);
  return of(messages_->start());
}

void EarlyAllreduce::spread() {
  if (!other_places_.empty()) {
    copy_.reduce(other_places_, {shape_.places.front()}, 0, shape_.numel * item_bytes(shape_.wire_dtype));
  }
  turns_.bring();
}

}  // namespace hvdlite
