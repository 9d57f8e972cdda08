// An allreduce of few bytes between nodes, in one call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bound_messages.h"
#include "early_turns.h"
#include "elements.h"
#include "pack.h"
#include "polite_look.h"
#include "ready_counts.h"
#include "reduce.h"

namespace hvdlite {

// What is the same every time: tensors lie in the layout as `numels` and `offsets` say, and travel by way of places,
// one for each rank of this node, of `numel` elements of the type in which they travel.
struct EarlyShape {
  std::vector<std::uint64_t> numels;
  std::vector<std::uint64_t> offsets;
  std::uint64_t numel;  // of the layout
  std::vector<std::uintptr_t> places;
  std::uint32_t rank;  // in the node
  DType dtype;         // of the tensors
  DType wire_dtype;
  std::optional<Reducer> in_node;  // of all places, into that of rank 0; none: it is alone, and has nothing to scale
};

class EarlyAllreduce {
 public:
  // `counts`, `turns` and `look` have to live as long.
  EarlyAllreduce(const ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape);

  // kNodeIsLate: a rank of this node has not begun, so that nothing was sent.
  enum class Progress { kDone = 0, kWaiting = 1, kFailed = 2, kNodeIsLate = 3 };

  // Does it as number `turn`. `messages`: of rank 0, on the memory of its place; null on others. Unless it is done, the
  // rest is the caller's: ranks are late, or this one was rung since it had counted `heard` rings.
  Progress run(BoundMessages* messages, const std::vector<std::uintptr_t>& inputs,
               const std::vector<std::uintptr_t>& outputs, std::uint64_t turn, std::uint32_t heard);

 private:
  Progress begin_exchange(BoundMessages& messages, std::uint64_t turn);
  void spread(std::uint64_t turn);

  const ReadyCounts& counts_;
  EarlyTurns& turns_;
  PoliteLook& look_;
  EarlyShape shape_;
  std::vector<std::uintptr_t> other_places_;
  Reducer copy_;
  TensorList inputs_;
  TensorList outputs_;
};

}  // namespace hvdlite
