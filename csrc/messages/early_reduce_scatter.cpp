#include "messages/early_reduce_scatter.h"

#include <utility>

namespace hvdlite {
namespace {

std::vector<std::uint64_t> starts_of(const EarlyShape& shape) {
  std::vector<std::uint64_t> starts;
  std::uint64_t end = 0;
  for (const std::uint64_t numel : shape.numels) {
    starts.push_back(end);
    end += numel * item_bytes(shape.dtype);
  }
  return starts;
}

}  // namespace

EarlyReduceScatter::EarlyReduceScatter(ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape,
                                       std::chrono::microseconds spin, double patience_s, std::uint32_t part)
    : EarlyAllreduce(counts, turns, look, shape, spin, patience_s),
      starts_(starts_of(shape)),
      parts_(starts_.size()),
      results_(starts_.size()),
      part_(part) {}

DirectCall::Result EarlyReduceScatter::run(const std::vector<std::uintptr_t>& inputs,
                                           const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
                                           std::uint64_t count, std::uint32_t heard) {
  for (std::size_t i = 0; i < starts_.size(); ++i) parts_[i] = inputs.at(0) + starts_[i];
  results_.at(part_) = outputs.at(0);
  return EarlyAllreduce::run(parts_, results_, plan, count, heard);
}

}  // namespace hvdlite
