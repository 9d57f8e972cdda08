// Allreduce of tensors that live in private memory, by way of windows of shared memory, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "elements.h"
#include "pack.h"
#include "signal.h"

namespace hvdlite {

// Every rank's staging memory holds four windows: two that it packs into, two that it reduces into.
constexpr std::uint64_t kStagingWindows = 4;

struct StagedAllreduce {
  const TensorList& inputs;
  const TensorList& outputs;
  std::vector<std::uintptr_t> staging;  // one address per rank
  std::uint64_t window_numel;
  std::uint64_t numel;  // of the fused layout
  DType dtype;          // of the tensors
  DType wire_dtype;     // in which they travel
  Op op;
  double prescale;
  double postscale;
};

// Runs `job` together with all other ranks of `barrier`. A barrier per window, and one more.
//
// In phase k a rank packs window k, reduces its shard of window k - 1 and fetches the others' shards of window k - 2;
// a barrier ends the phase. Each window is used again two phases later, when nobody reads it any more; so no barrier is
// needed at the end, provided that the staging memory is used for nothing else.
//
// What crosses from core to core is 2(n-1)/n of the bytes, the least there is. A rank's own shard does not even pass
// through shared memory where one tensor has all of the window and no cast is asked for.
WaitStatus staged_allreduce(Barrier& barrier, const StagedAllreduce& job, double timeout_s);

}  // namespace hvdlite
