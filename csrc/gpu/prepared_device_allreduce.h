// An allreduce between the GPUs of a node that comes again and again as an operation of a frozen plan, in one call:
// once the threads of all ranks have come it is enqueued, after what the caller's stream does before it, and before the
// rest.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/direct_allreduce.h"
#include "gpu/stream_barrier.h"
#include "kernels/pack.h"
#include "prepared/prepared_in_node.h"

namespace hvdlite {

// What is the same every time. Tensors lie in the layout as `numels` and `offsets` say, and are reduced by way of
// windows.
struct DeviceAllreduceShape {
  std::vector<std::uint64_t> numels;
  std::vector<std::uint64_t> offsets;
  std::uint64_t numel;                  // of the layout
  DType dtype;                          // of the tensors
  std::vector<std::uintptr_t> windows;  // of each rank
  std::uint64_t window_numel;
  DeviceReduction reduction;  // of the type in which they travel
};

class PreparedDeviceAllreduce : public PreparedInNode {
 public:
  // `barrier` and `counts` have to live as long.
  PreparedDeviceAllreduce(StreamBarrier& barrier, ReadyCounts& counts, DeviceAllreduceShape shape, Patience patience);

  // The caller's stream, for the next `run`.
  void use_stream(std::uintptr_t stream) { stream_ = stream; }
  // Reached once the GPU has done the last that was enqueued; to be taken once.
  std::unique_ptr<Moment> take_done() { return std::move(done_); }

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override;

 private:
  StreamBarrier& barrier_;
  DeviceAllreduceShape shape_;
  TensorList inputs_;
  TensorList outputs_;
  std::uintptr_t stream_ = 0;
  std::unique_ptr<Moment> ready_;
  std::unique_ptr<Moment> done_;
};

}  // namespace hvdlite
