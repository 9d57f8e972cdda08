// A burst of few bytes, from its first operation on: collected, started and completed, and no Python runs in between.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "calls/signature.h"
#include "calls/started.h"

namespace hvdlite {

// What is the same of it in every period of a plan.
struct PlannedBurst {
  pybind11::object known;     // to Python
  pybind11::object prepared;  // does it, by `call`, which lives as long
  DirectCall* call;
  std::shared_ptr<const Signatures> signatures;
  // Of an operation: its sequence in the first period; in each one after that it is `stride` larger.
  struct Number {
    std::int64_t first;
    std::int64_t stride;
  };
  std::vector<Number> numbers;

  std::size_t size() const { return numbers.size(); }
};

// Open while more of it is to come, as csrc/calls/collecting.h does; then the shortcut's, as anything it starts.
// Whatever is in the way, Python goes on with a burst of its own: `settle` is told of that.
class StartedBurst : public Started {
 public:
  // `take_apart`: is called where somebody waits for it while it is open; it is settled then. `since_ns`: now, by the
  // steady clock.
  StartedBurst(std::shared_ptr<PlannedBurst> planned, std::shared_ptr<Shortcut> shortcut, pybind11::object take_apart,
               std::int64_t since_ns);

  // Of what there is of it: (input, output, sequence, owner of both).
  const pybind11::list& parts() const { return parts_; }
  void add(std::uintptr_t input, std::uintptr_t output, std::int64_t sequence, const pybind11::object& owner);
  bool is_open() const { return static_cast<bool>(take_apart_); }

  const std::shared_ptr<PlannedBurst>& planned() const { return planned_; }
  std::int64_t since_ns() const { return since_ns_; }
  // Whether the user has waited between what was submitted before and its first operation.
  bool was_waited_before() const { return was_waited_before_; }

  // Whether its operations have the numbers that they have in period `turn`.
  bool is_in_turn(std::int64_t turn) const;
  // As operations up to `count` of `plan`.
  void start(std::uint64_t plan, std::uint64_t count);

  Kept kept() const override { return {planned_->prepared, parts_}; }
  pybind11::object under_way() const override { return pybind11::make_tuple(planned_->known, parts_); }
  pybind11::object go_on(const Rest& rest, DirectCall::Result ended) override;

  // For operation `number` of it, see `StartedOperation`.
  void wait(std::size_t number);
  bool poll(std::size_t number);
  // Somebody waits for it.
  void ask() { has_waited()->is_set = true; }

 private:
  void close();
  void release() override;

  std::shared_ptr<PlannedBurst> planned_;
  pybind11::object take_apart_;  // null once it is not open
  std::int64_t since_ns_;
  bool was_waited_before_;
  pybind11::list parts_;
  std::vector<std::uintptr_t> inputs_;
  std::vector<std::uintptr_t> outputs_;
  std::vector<std::int64_t> sequences_;
};

}  // namespace hvdlite
