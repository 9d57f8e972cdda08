// What the shortcut has started, and somebody may wait for later.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "prepared/direct_call.h"

namespace hvdlite {

struct Flag;
class Shortcut;

// One operation. `owner`: of the tensors, as they are now.
struct Operation {
  pybind11::object prepared;
  SplitPhaseCall* call = nullptr;
  std::int64_t sequence = 0;
  std::uintptr_t input = 0;
  std::uintptr_t output = 0;
  pybind11::object owner;
};

// Does what was begun and not done without a remark, at work, as it has `ended`; returns what is to be waited for
// afterwards, or None.
struct Rest {
  pybind11::object of_operation;  // (prepared, sequence, input, output, owner, ended)
  pybind11::object of_burst;      // (StartedBurst, ended)

  pybind11::object of(const Operation& operation, DirectCall::Result ended) const;
};

// All of it needs the GIL.
class Started : public std::enable_shared_from_this<Started> {
 public:
  Started(SplitPhaseCall* call, std::shared_ptr<Shortcut> shortcut);
  virtual ~Started() = default;
  Started(const Started&) = delete;
  Started& operator=(const Started&) = delete;

  // While it is not settled.
  SplitPhaseCall* call() const { return call_; }
  // What must live while `call` is at it.
  using Kept = std::pair<pybind11::object, pybind11::object>;
  virtual Kept kept() const = 0;
  // What others do not know to be submitted: (prepared, sequence) of an operation, (known, parts) of a burst.
  virtual pybind11::object under_way() const = 0;
  virtual pybind11::object go_on(const Rest& rest, DirectCall::Result ended) = 0;

  // By who is at work, once. `left`: what is waited for from now on, as late ranks are; None: it is complete.
  void settle(pybind11::object left);
  // It has ended in `error`.
  void fail(pybind11::object error);

  bool is_settled() const { return static_cast<bool>(left_); }
  bool is_complete() const { return left_ && left_.is_none() && !error_; }

 protected:
  // What is left, once it is settled; raises what it has ended in.
  pybind11::object await();
  // The same at once: null where it is not settled.
  pybind11::object look();
  // Refer to nothing any more, as somebody may keep the handle for long.
  virtual void release() = 0;

  const std::shared_ptr<Flag>& has_waited() const { return has_waited_; }

 private:
  SplitPhaseCall* call_;
  std::shared_ptr<Shortcut> shortcut_;
  std::shared_ptr<Flag> has_waited_;
  pybind11::object left_;   // null until it is settled
  pybind11::object error_;  // null where there is none
};

class StartedOperation : public Started {
 public:
  StartedOperation(Operation operation, std::shared_ptr<Shortcut> shortcut);

  // While it is not settled.
  const Operation& operation() const { return operation_; }
  Kept kept() const override { return {operation_.prepared, operation_.owner}; }
  pybind11::object under_way() const override { return pybind11::make_tuple(operation_.prepared, operation_.sequence); }
  pybind11::object go_on(const Rest& rest, DirectCall::Result ended) override { return rest.of(operation_, ended); }

  // Until it is complete; raises what it has ended in.
  void wait();
  // Whether `wait` would return, or raise, at once.
  bool poll();

 private:
  void release() override { const auto dropped = std::exchange(operation_, {}); }

  Operation operation_;
};

}  // namespace hvdlite
