// Allreduce of few bytes by the ranks of a node, and reduce-scatter, of which each rank wants a part.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/elements.h"
#include "kernels/tensor_reduction.h"
#include "node/places_in_turn.h"

namespace hvdlite {

// A rank packs all of its tensors into its place, and reduces what the others have packed, and what it has itself, into
// its own tensors.
class SmallAllreduce {
 public:
  // What lies in memory that all ranks can reach is reduced in less time where it is, if it is more than this.
  static constexpr std::uint64_t kMostBytesAtHome = 8 << 10;

  // `places` have to live as long.
  explicit SmallAllreduce(PlacesInTurn& places);

  std::uint64_t most_bytes() const { return places_.most_bytes(); }
  const PlacesInTurn& places() const { return places_; }

  // Elements of the layout that this rank wants; its outputs lie there.
  struct Part {
    std::uint64_t begin;
    std::uint64_t end;
  };

  WaitStatus run(const TensorReduction& job, Part wanted, double timeout_s);
  WaitStatus run(const TensorReduction& job, double timeout_s) { return run(job, {0, job.numel}, timeout_s); }

  // The first half of `run`, which then does the second: after it the other ranks do not wait for this one.
  void begin(const TensorReduction& job);

 private:
  void reduce(const TensorReduction& job, Part wanted) const;

  PlacesInTurn& places_;
  std::unique_ptr<char[]> scratch_;  // of `most_bytes`: what is not in one piece, or of another type, on its way
  std::uintptr_t source_ = 0;        // what this rank has begun with; whoever finishes may describe it otherwise
};

}  // namespace hvdlite
