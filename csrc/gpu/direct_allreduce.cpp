#include "gpu/direct_allreduce.h"

#include <algorithm>

#include "kernels/shard.h"

namespace hvdlite {

void direct_allreduce(StreamBarrier& barrier, const std::vector<std::uintptr_t>& copies, std::uint64_t numel,
                      const DeviceReduction& reduction) {
  const DeviceStream& stream = barrier.stream();
  const auto size = static_cast<std::uint64_t>(barrier.size()), rank = static_cast<std::uint64_t>(barrier.rank());
  const Bounds shard = shard_bounds(numel, size, rank, reduction.dtype);
  barrier.meet();
  if (shard.begin < shard.end) {
    std::vector<std::uintptr_t> shards = copies;
    for (auto& address : shards) address += shard.begin * item_bytes(reduction.dtype);
    DeviceKernels::of(stream.device())
        .reduce(shards, shards, shard.end - shard.begin, reduction.dtype, reduction.op, reduction.prescale,
                reduction.postscale, stream.handle());
  }
  barrier.meet();
}

void direct_allreduce(StreamBarrier& barrier, const TensorList& inputs, const TensorList& outputs, DType dtype,
                      std::uint64_t numel, const std::vector<std::uintptr_t>& copies, std::uint64_t window_numel,
                      const DeviceReduction& reduction) {
  const DeviceStream& stream = barrier.stream();
  const DeviceKernels& kernels = DeviceKernels::of(stream.device());
  const cuda::Address own = copies[static_cast<std::size_t>(barrier.rank())];
  for (std::uint64_t begin = 0; begin < numel; begin += window_numel) {
    const std::uint64_t end = std::min(numel, begin + window_numel);
    kernels.pack(inputs, own, begin, end, dtype, reduction.dtype, stream.handle());
    direct_allreduce(barrier, copies, end - begin, reduction);
    kernels.unpack(outputs, own, begin, end, reduction.dtype, dtype, stream.handle());
  }
}

}  // namespace hvdlite
