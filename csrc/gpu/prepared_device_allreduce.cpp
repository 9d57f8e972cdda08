#include "gpu/prepared_device_allreduce.h"

namespace hvdlite {

PreparedDeviceAllreduce::PreparedDeviceAllreduce(StreamBarrier& barrier, ReadyCounts& counts,
                                                 DeviceAllreduceShape shape, Patience patience)
    : PreparedInNode(counts, nullptr, patience),
      barrier_(barrier),
      shape_(std::move(shape)),
      inputs_(std::vector<std::uintptr_t>(shape_.numels.size()), shape_.numels, shape_.offsets),
      outputs_(inputs_) {}

void PreparedDeviceAllreduce::begin(const std::vector<std::uintptr_t>& inputs,
                                    const std::vector<std::uintptr_t>& outputs) {
  inputs_.move_to(inputs);
  outputs_.move_to(outputs);
  ready_ = std::make_unique<Moment>(barrier_.stream().device(), stream_);
}

PreparedDeviceAllreduce::Result PreparedDeviceAllreduce::finish() {
  const DeviceStream& stream = barrier_.stream();
  stream.follow({ready_.get()});
  direct_allreduce(barrier_, inputs_, outputs_, shape_.dtype, shape_.numel, shape_.windows, shape_.window_numel,
                   shape_.reduction);
  done_ = std::make_unique<Moment>(stream.device(), reinterpret_cast<std::uintptr_t>(stream.handle()));
  done_->precede(stream_);
  return Result::kDone;
}

}  // namespace hvdlite
