// Allreduce between the GPUs of a node, or on one that ranks share: each rank reduces its shard of all copies into all
// copies. Calls enqueue, and return at once.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/device_kernels.h"
#include "gpu/stream_barrier.h"
#include "kernels/elements.h"
#include "kernels/pack.h"

namespace hvdlite {

struct DeviceReduction {
  DType dtype;
  Op op;
  double prescale;
  double postscale;
};

// `numel` elements of which rank i has its copy at `copies[i]`. When the stream has come past it, this rank's copy is
// the result, and nobody touches it any more.
void direct_allreduce(StreamBarrier& barrier, const std::vector<std::uintptr_t>& copies, std::uint64_t numel,
                      const DeviceReduction& reduction);

// The same of tensors anywhere on this rank's device, of `numel` elements as they lie in their list and of type
// `dtype`, by way of copies of `window_numel` elements of `reduction.dtype`.
void direct_allreduce(StreamBarrier& barrier, const TensorList& inputs, const TensorList& outputs, DType dtype,
                      std::uint64_t numel, const std::vector<std::uintptr_t>& copies, std::uint64_t window_numel,
                      const DeviceReduction& reduction);

}  // namespace hvdlite
