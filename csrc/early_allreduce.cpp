#include "early_allreduce.h"

#include <utility>

namespace hvdlite {

EarlyAllreduce::EarlyAllreduce(const ReadyCounts& counts, PoliteLook& look, EarlyShape shape)
    : counts_(counts),
      look_(look),
      shape_(std::move(shape)),
      inputs_(std::vector<std::uintptr_t>(shape_.numels.size()), shape_.numels, shape_.offsets),
      outputs_(inputs_) {}

BoundMessages::Progress EarlyAllreduce::run(BoundMessages& messages, const std::vector<std::uintptr_t>& inputs,
                                            const std::vector<std::uintptr_t>& outputs, std::uint32_t heard) {
  using Progress = BoundMessages::Progress;
  inputs_.move_to(inputs);
  outputs_.move_to(outputs);
  inputs_.pack(shape_.place, 0, shape_.numel, shape_.dtype, shape_.wire_dtype, 1.0);
  Progress progress = messages.start();
  look_.until([&] {
    if (progress == Progress::kWaiting) progress = messages.advance();
    return progress != Progress::kWaiting || counts_.has_news(heard);
  });
  if (progress == Progress::kDone) {
    outputs_.unpack(shape_.place, 0, shape_.numel, shape_.wire_dtype, shape_.dtype, 1.0);
  }
  return progress;
}

}  // namespace hvdlite
