// The shortest way from a call in Python to an operation that was done before: no Python runs in between.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "calls/signature.h"
#include "calls/started.h"
#include "calls/started_burst.h"
#include "prepared/direct_call.h"

namespace hvdlite {

// A plan that runs free says which operation comes next, and so with what it will be called. Where it is, it is done
// here; else nothing happens, and the caller goes the long way, by `hvdlite.coordinator`. That `take`s what was done
// here before it does anything of its own.
//
// All is done with the GIL, but the operation itself; so between two looks at what Python sees nobody else does
// anything. Whoever is at work holds `at_work`, as the coordinator does.
// An operation of two phases that nobody waits for at once is only started. Until it is complete it is the last thing
// that was begun: whatever comes next completes it, or leaves it to the coordinator.
class Shortcut : public std::enable_shared_from_this<Shortcut> {
 public:
  // `at_work`: a threading.RLock. `recorder`: while its `enabled` is true nothing is done here. `rest`: does what was
  // not done at once. `settle`: is called where somebody else is at work, for a while: that what was started be
  // settled. `has_waited`: whether the user has waited, or asked, since the last submission.
  Shortcut(pybind11::object at_work, pybind11::object recorder, Rest rest, pybind11::object settle,
           std::shared_ptr<Flag> has_waited);

  // A plan begins. Whether what was learned is known still, as another one of this `serial` was followed before.
  bool follow(std::uint64_t plan, std::size_t period, std::uint64_t serial);

  // An operation of a plan. `prepared`: does it, by `call`, which lives as long. `new_result`: makes a result, of the
  // tensor and of as many rows as `call` says; None where it is like the tensor. `gives`: whether the caller's tensor
  // is what this rank contributes; else zeros are. `unnamed`: counts it, null where it has a name. `sequence`: its
  // number in the first period; in each one after that it is `stride` larger.
  struct Known {
    std::shared_ptr<const Signature> signature;
    pybind11::object prepared;
    DirectCall* call = nullptr;
    pybind11::object new_result;
    bool gives = true;
    std::shared_ptr<Count> unnamed;
    std::int64_t sequence = 0;
    std::int64_t stride = 0;
  };
  void learn(std::size_t position, Known known);
  // All from `position` on that is done as one.
  void learn_burst(std::size_t position, std::shared_ptr<PlannedBurst> burst);
  bool knows(std::size_t position, const pybind11::object& prepared) const;
  bool knows_burst(std::size_t position, const pybind11::object& known) const;

  // This rank has done `done` operations of the plan, and has followed `heard` rings; it was at nothing else when
  // `closings` was read, and if it has been closed since, it may be now.
  void open(std::uint64_t done, std::uint32_t heard, std::uint64_t closings);
  // Something else is begun.
  void close();
  // Whoever is at work looks at the plan: nothing is done meanwhile, and he may open it again as if he had not.
  void pause() { is_open_ = false; }
  bool is_open() const { return is_open_; }
  std::uint64_t closings() const { return closings_; }
  void forget();

  // Since the last time: (prepared, or PlannedBurst, and how often it was done), the last one last.
  std::vector<std::pair<pybind11::object, std::uint64_t>> take();
  // How many operations `take` has yet to tell of.
  std::uint64_t untold() const { return untold_; }

  // Since the last time: how many periods of the plan were begun here, without a wait before them and with one.
  struct Periods {
    std::uint64_t together = 0;
    std::uint64_t waited = 0;
  };
  Periods take_periods() { return std::exchange(periods_, {}); }

  // The result of the operation; null where nothing was done. Without `new_like` it takes the place of the input.
  // Raises what the operation ends in.
  pybind11::object repeat(const Arguments& arguments, pybind11::handle new_like);

  // Starts it: what `make_handle` makes of (started, result, name).
  pybind11::object start(const Arguments& arguments, pybind11::handle new_like, pybind11::handle make_handle);
  // By who is at work, and settles it: what was started; null where there is nothing.
  std::shared_ptr<Started> take_started() { return started_ == nullptr ? nullptr : taken_ = std::move(started_); }
  // What was started last, whether it was taken or not, until it is settled; null where there is nothing.
  std::shared_ptr<Started> unsettled() const {
    if (started_ != nullptr) return started_;
    return taken_ == nullptr || taken_->is_settled() ? nullptr : taken_;
  }
  // What others do not know to be submitted, see `Started::under_way`: that, or the operation that `repeat` is at; None
  // where there is nothing.
  pybind11::object under_way() const;

  // What comes next, if that is a burst that can be started here; null else. What was started before is complete then.
  std::shared_ptr<PlannedBurst> next_burst();
  // Whether it still does. No Python runs.
  bool expects(const std::shared_ptr<PlannedBurst>& burst) const;
  // All of it is there. False where nothing has happened.
  bool start(const std::shared_ptr<StartedBurst>& burst);
  // Waits for it as `repeat` does. Nothing happens if somebody else is at work, or has settled it. Raises what it ends
  // in.
  void complete(const std::shared_ptr<Started>& started);
  void have_settled() const { settle_(); }
  const std::shared_ptr<Flag>& has_waited() const { return has_waited_; }
  // A signal handler has interrupted it there, and must not wait.
  bool is_own_thread_at_work() const;

 private:
  struct Entry : Known {
    std::shared_ptr<PlannedBurst> burst;  // null where it is one operation, or not known
    std::uint64_t times = 0;              // that `take` has yet to tell of

    std::size_t size() const { return burst == nullptr ? 1 : burst->size(); }
  };

  // What is about to be done, and with what.
  struct Next {
    Operation operation;  // with an owner where it is only started
    DirectCall* call = nullptr;
    pybind11::object result;
  };
  class AtWork;

  Entry* next();
  bool is_recording() const;
  bool begin(const Arguments& arguments, pybind11::handle new_like, bool starts, AtWork& at_work, Next& next);
  bool is_started(const Arguments& arguments) const;
  bool is_rid_of_started(bool waits);
  void count_period(bool was_waited_before);
  void count_submission(bool is_waited_for);
  bool count_done(DirectCall::Result ended);
  void prepare_to_hand_over(std::optional<pybind11::error_already_set>& interrupt);

  pybind11::object is_owned_;
  pybind11::object acquire_;
  pybind11::object release_;
  pybind11::object recorder_;
  Rest rest_;
  pybind11::object settle_;
  std::shared_ptr<Flag> has_waited_;
  std::shared_ptr<Started> started_;
  std::shared_ptr<Started> taken_;                                     // and perhaps settled
  std::optional<std::pair<pybind11::object, std::int64_t>> repeated_;  // (prepared, sequence)
  std::vector<Entry> entries_;
  std::map<std::uint64_t, std::vector<Entry>> earlier_;  // of plans that are not followed now, by their serials
  std::uint64_t serial_ = 0;
  std::uint64_t plan_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t untold_ = 0;
  Periods periods_;
  std::uint64_t closings_ = 0;
  std::uint32_t heard_ = 0;
  bool is_open_ = false;
  std::vector<std::uintptr_t> input_{0};
  std::vector<std::uintptr_t> output_{0};
};

}  // namespace hvdlite
