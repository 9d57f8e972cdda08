// A reduce-scatter of few bytes between nodes, in one call: an allreduce, of whose result each rank wants a part.
#pragma once

#include <cstdint>
#include <vector>

#include "messages/early_allreduce.h"

namespace hvdlite {

// It takes one tensor, whose parts lie one after the other, and are the tensors of `shape`.
class EarlyReduceScatter : public EarlyAllreduce {
 public:
  // `part`: which one this rank wants; else see `EarlyAllreduce`.
  EarlyReduceScatter(ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape,
                     std::chrono::microseconds spin, double patience_s, std::uint32_t part);

  Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count, std::uint32_t heard) override;

 private:
  std::vector<std::uint64_t> starts_;  // of the parts, in bytes
  std::vector<std::uintptr_t> parts_;
  std::vector<std::uintptr_t> results_;
  std::uint32_t part_;
};

}  // namespace hvdlite
