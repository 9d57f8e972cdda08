#include "early_allreduce.h"

#include <utility>

namespace hvdlite {
namespace {

EarlyAllreduce::Progress of(BoundMessages::Progress progress) {
  return static_cast<EarlyAllreduce::Progress>(progress);
}

}  // namespace

EarlyAllreduce::EarlyAllreduce(const ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape)
    : counts_(counts),
      turns_(turns),
      look_(look),
      shape_(std::move(shape)),
      other_places_(shape_.places.begin() + 1, shape_.places.end()),
      copy_(DType::kUint8, Op::kSum, 1.0, 1.0),
      inputs_(std::vector<std::uintptr_t>(shape_.numels.size()), shape_.numels, shape_.offsets),
      outputs_(inputs_) {}

EarlyAllreduce::Progress EarlyAllreduce::run(BoundMessages* messages, const std::vector<std::uintptr_t>& inputs,
                                             const std::vector<std::uintptr_t>& outputs, std::uint64_t turn,
                                             std::uint32_t heard) {
  inputs_.move_to(inputs);
  outputs_.move_to(outputs);
  const std::uintptr_t place = shape_.places[shape_.rank];
  inputs_.pack(place, 0, shape_.numel, shape_.dtype, shape_.wire_dtype, 1.0);
  turns_.begin(turn);
  Progress progress = messages == nullptr ? Progress::kWaiting : Progress::kNodeIsLate;
  look_.until([&] {
    if (progress == Progress::kNodeIsLate) {
      progress = begin_exchange(*messages, turn);
    } else if (messages != nullptr) {
      progress = of(messages->advance());
    } else if (turns_.has_come(turn)) {
      progress = Progress::kDone;
    }
    return progress == Progress::kDone || progress == Progress::kFailed || counts_.has_news(heard);
  });
  if (progress != Progress::kDone) return progress;
  if (messages != nullptr) spread(turn);
  outputs_.unpack(place, 0, shape_.numel, shape_.wire_dtype, shape_.dtype, 1.0);
  return progress;
}

EarlyAllreduce::Progress EarlyAllreduce::begin_exchange(BoundMessages& messages, std::uint64_t turn) {
  if (!turns_.all_have_begun(turn)) return Progress::kNodeIsLate;
  if (shape_.in_node) shape_.in_node->reduce({shape_.places.front()}, shape_.places, 0, shape_.numel);
  return of(messages.start());
}

void EarlyAllreduce::spread(std::uint64_t turn) {
  if (!other_places_.empty()) {
    copy_.reduce(other_places_, {shape_.places.front()}, 0, shape_.numel * item_bytes(shape_.wire_dtype));
  }
  turns_.bring(turn);
}

}  // namespace hvdlite
