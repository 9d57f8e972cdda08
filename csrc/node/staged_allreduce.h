// Allreduce of tensors that live in private memory, by way of windows of shared memory, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tensor_reduction.h"
#include "waiting/signal.h"

namespace hvdlite {

// Every rank's staging memory holds two windows.
constexpr std::uint64_t kStagingWindows = 2;

struct StagedAllreduce : TensorReduction {
  std::vector<std::uintptr_t> staging;  // one address per rank
  std::uint64_t window_numel;           // at most
};

// Runs `job` together with all other ranks of `barrier`. A barrier per window, and one more.
//
// In phase k a rank unpacks window k - 2 from its own staging memory, packs window k into the same place, and reduces
// its shard of window k - 1 where it lies in everybody's staging memory; a barrier ends the phase. Nobody else touches
// what a rank packs or unpacks, so no barrier is needed at the end, provided that the memory is used for nothing else.
//
// What crosses from core to core is 2(n-1)/n of the bytes, the least there is, and each line of it travels there and
// back: who fetches it writes into it, and so never has to take it away from a core that only read it. (Results in
// windows of their own, which others fetched: 1.5 times as long.) A rank's own shard does not even pass through shared
// memory where one tensor has all of the shard and no cast is asked for.
WaitStatus staged_allreduce(Barrier& barrier, const StagedAllreduce& job, double timeout_s);

}  // namespace hvdlite
