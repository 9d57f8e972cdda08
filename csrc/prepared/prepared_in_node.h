// Operations of a frozen plan that come again and again between the ranks of a node, each in one call.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "node/ordered_exchange.h"
#include "node/places_in_turn.h"
#include "node/ready_counts.h"
#include "prepared/direct_call.h"
#include "waiting/signal.h"

namespace hvdlite {

// How long they wait: for all ranks to be ready `patience_s`, of which `spin` without sleep; `timeout_s` inside.
struct Patience {
  std::chrono::microseconds spin;
  double patience_s;
  double timeout_s;
};

// Windows for what is not small; `card`: what all ranks show there.
struct Windows {
  OrderedExchange& exchange;
  std::uint64_t card;
};

// For `heard` and kDoneAndRung see ReadyCounts::await. What is of few bytes is done in two phases: the first has put
// them where the other ranks reach them.
class PreparedInNode : public DirectCall, private SplitPhaseCall {
 public:
  using Result = DirectCall::Result;

  Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count, std::uint32_t heard) final;
  SplitPhaseCall* split_phase() final { return places_ == nullptr ? nullptr : this; }

  // When all ranks were ready for the last that was done.
  Clock::time_point ready() const { return ready_; }

 protected:
  // `counts` and `places` have to live as long. `places`: in which `begin` begins a turn; null where it does not.
  PreparedInNode(ReadyCounts& counts, const PlacesInTurn* places, Patience patience)
      : patience_(patience), counts_(counts), places_(places) {}

  // What this rank does before the others are ready; it may be withdrawn. If it throws, nobody has been told.
  virtual void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) = 0;
  // All ranks are ready: kDone, kBegun, kTimeout or kAborted, which is also what it is if it throws.
  virtual Result finish() = 0;

  static Result result_of(WaitStatus status);
  static Result result_of(OrderedExchange::Result result);

  const Patience patience_;

 private:
  void start(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count) final;
  bool is_ready(std::chrono::microseconds moment) const final;
  Result complete(std::uint32_t heard) final;
  Result complete_now() final;

  ReadyCounts::Outcome await(std::uint32_t heard);
  Result finish_as(ReadyCounts::Outcome ready);

  ReadyCounts& counts_;
  const PlacesInTurn* places_;
  Clock::time_point ready_{};
};

// It is done once all are ready.
class PreparedBarrier : public PreparedInNode {
 public:
  PreparedBarrier(ReadyCounts& counts, Patience patience) : PreparedInNode(counts, nullptr, patience) {}

 protected:
  void begin(const std::vector<std::uintptr_t>&, const std::vector<std::uintptr_t>&) override {}
  Result finish() override { return Result::kDone; }
};

}  // namespace hvdlite
