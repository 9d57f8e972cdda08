// An operation that the shortcut has started, and that somebody may wait for later.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "prepared/direct_call.h"

namespace hvdlite {

struct Flag;
class Shortcut;

// All of it needs the GIL.
class Started : public std::enable_shared_from_this<Started> {
 public:
  // As the shortcut knows it. `owner`: of the tensors, as they are now.
  struct Operation {
    pybind11::object prepared;
    SplitPhaseCall* call;
    std::int64_t sequence;
    std::uintptr_t input;
    std::uintptr_t output;
    pybind11::object owner;
  };

  Started(Operation operation, std::shared_ptr<Shortcut> shortcut);

  // While it is not settled.
  const Operation& operation() const { return operation_; }

  // Until it is complete; raises what it has ended in.
  void wait();
  // Whether `wait` would return, or raise, at once.
  bool poll();

  // By who is at work, once. `left`: what is waited for from now on, as late ranks are; None: it is complete.
  void settle(pybind11::object left);
  // It has ended in `error`.
  void fail(pybind11::object error);

  bool is_settled() const { return static_cast<bool>(left_); }
  bool is_complete() const { return left_ && left_.is_none() && !error_; }

 private:
  Operation operation_;
  std::shared_ptr<Shortcut> shortcut_;
  std::shared_ptr<Flag> has_waited_;
  pybind11::object left_;   // null until it is settled
  pybind11::object error_;  // null where there is none
};

}  // namespace hvdlite
