// The kernels of csrc/cuda/multicast.h on a GPU: everything is enqueued.
#pragma once

#include <cstdint>

#include "gpu/cuda_driver.h"
#include "gpu/kernel_module.h"
#include "kernels/elements.h"

namespace hvdlite {

// Of whole vectors of 16 bytes, at addresses that are multiples of 16.
class MulticastKernels {
 public:
  // Those of a device, loaded at the first call. Throws std::runtime_error that says why they cannot be.
  static const MulticastKernels& of(int device);

  // From `source` to the memory of all GPUs at `multicast`. Throws std::invalid_argument where it is not in whole
  // vectors.
  void store(cuda::Address multicast, cuda::Address source, std::uint64_t nbytes, cuda::Stream stream) const;

  // The sum of the memory of all GPUs at `multicast`, of floats, to `destination`, or back to all of them where that is
  // 0. Throws std::invalid_argument where it is not in whole vectors, or not of floats.
  void sum(cuda::Address destination, cuda::Address multicast, std::uint64_t nbytes, DType dtype,
           cuda::Stream stream) const;

  MulticastKernels(const MulticastKernels&) = delete;
  MulticastKernels& operator=(const MulticastKernels&) = delete;

 private:
  explicit MulticastKernels(int device);

  KernelModule module_;
};

}  // namespace hvdlite
