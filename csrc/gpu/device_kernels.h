// The kernels of csrc/cuda on a GPU: everything is enqueued, and what a call is given may go when it returns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/cuda_driver.h"
#include "gpu/kernel_module.h"
#include "kernels/elements.h"
#include "kernels/pack.h"

namespace hvdlite {

class DeviceKernels {
 public:
  // Those of a device, loaded at the first call. Throws std::runtime_error that says why they cannot be.
  static const DeviceKernels& of(int device);

  // As TensorList::pack and unpack, by a launch per 160 tensors. Addresses are multiples of the size of an element.
  void pack(const TensorList& tensors, cuda::Address buffer, std::uint64_t begin, std::uint64_t end, DType from,
            DType to, cuda::Stream stream) const;
  void unpack(const TensorList& tensors, cuda::Address buffer, std::uint64_t begin, std::uint64_t end, DType from,
              DType to, cuda::Stream stream) const;

  // As Reducer (reduce.h), up to 64 arrays on either side, to the bit but for which NaN a NaN is.
  void reduce(const std::vector<std::uintptr_t>& destinations, const std::vector<std::uintptr_t>& sources,
              std::uint64_t numel, DType dtype, Op op, double prescale, double postscale, cuda::Stream stream) const;

  // Every element becomes `value`; what integers cannot be saturates.
  void fill(cuda::Address address, std::uint64_t numel, DType dtype, double value, cuda::Stream stream) const;

  DeviceKernels(const DeviceKernels&) = delete;
  DeviceKernels& operator=(const DeviceKernels&) = delete;

 private:
  explicit DeviceKernels(int device);
  cuda::Function move_kernel(const std::string& verb, DType from, DType to) const;
  void move(cuda::Function kernel, const TensorList& tensors, cuda::Address buffer, std::uint64_t begin,
            std::uint64_t end, std::size_t buffer_item_bytes, cuda::Stream stream) const;

  KernelModule module_;
};

// What the kernels were built as: "ptx", or "nvrtc" where a compiler is needed at run time.
const char* kernel_image();

}  // namespace hvdlite
