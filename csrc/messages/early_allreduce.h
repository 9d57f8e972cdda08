// An allreduce of few bytes between nodes, in one call.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/elements.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "messages/bound_messages.h"
#include "messages/early_turns.h"
#include "node/ready_counts.h"
#include "prepared/direct_call.h"
#include "waiting/polite_look.h"

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

// It ends with kNotYet where a rank of this node is not ready, and nothing else was done; with kBegun where ranks are
// late with what has begun, or this one was rung, or got a signal; kTimeout and kAborted there are none.
class EarlyAllreduce : public DirectCall {
 public:
  // `counts`, `turns` and `look` have to live as long. `patience_s`: the longest wait for all ranks of the node to be
  // ready, of which `spin` without sleep, and then for the result.
  EarlyAllreduce(ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape,
                 std::chrono::microseconds spin, double patience_s);

  // Rank 0 needs `messages`, on the memory of its place, and new ones when these are closed; others need none.
  void bind(std::shared_ptr<BoundMessages> messages) { messages_ = std::move(messages); }
  bool can_run() const override { return shape_.rank != 0 || (messages_ != nullptr && !messages_->is_closed()); }

  Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count, std::uint32_t heard) override;

  // Of the last that has begun. kNodeIsLate: a rank of this node has not, so that nothing was sent.
  enum class Progress { kDone = 0, kWaiting = 1, kFailed = 2, kNodeIsLate = 3 };
  Progress progress() const { return progress_; }
  Clock::time_point began() const { return began_; }
  const TensorList& outputs() const { return outputs_; }
  // Whether this rank was rung since it was called.
  bool has_news() const { return counts_.has_news(heard_); }

 private:
  bool node_is_ready() const;
  bool leads() const { return shape_.rank == 0; }
  bool advance();
  Clock::time_point next_look() const;
  Progress begin_exchange();
  void spread();

  ReadyCounts& counts_;
  EarlyTurns& turns_;
  PoliteLook& look_;
  EarlyShape shape_;
  std::vector<std::uintptr_t> other_places_;
  Reducer copy_;
  TensorList inputs_;
  TensorList outputs_;
  std::chrono::microseconds spin_;
  double patience_s_;
  std::shared_ptr<BoundMessages> messages_;
  std::uint32_t heard_ = 0;
  Progress progress_ = Progress::kDone;
  Clock::time_point began_{};
};

}  // namespace hvdlite
