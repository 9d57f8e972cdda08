#include "prepared/prepared_broadcast.h"

#include <cstring>

#include "kernels/pack.h"

namespace hvdlite {

void PreparedBroadcast::begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) {
  source_ = inputs.at(0);
  target_ = outputs.at(0);
}

PreparedBroadcast::Result PreparedBroadcast::finish() {
  if (source_ != 0 && source_ != target_) {
    std::memcpy(reinterpret_cast<void*>(target_), reinterpret_cast<const void*>(source_), bytes_);
  }
  const TensorList tensor({target_}, {bytes_}, {0});
  return result_of(
      windows_.exchange.broadcast(windows_.card, tensor, bytes_, static_cast<int>(root_), patience_.timeout_s));
}

}  // namespace hvdlite
