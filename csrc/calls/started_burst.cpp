#include "calls/started_burst.h"

#include <utility>

namespace py = pybind11;

namespace hvdlite {

StartedBurst::StartedBurst(std::shared_ptr<PlannedBurst> planned, std::shared_ptr<Shortcut> shortcut,
                           py::object take_apart, std::int64_t since_ns)
    : Started(planned->call->split_phase(), std::move(shortcut)),
      planned_(std::move(planned)),
      take_apart_(std::move(take_apart)),
      since_ns_(since_ns),
      was_waited_before_(std::exchange(has_waited()->is_set, false)) {
  inputs_.reserve(planned_->size());
  outputs_.reserve(planned_->size());
  sequences_.reserve(planned_->size());
}

void StartedBurst::add(std::uintptr_t input, std::uintptr_t output, std::int64_t sequence, const py::object& owner) {
  parts_.append(py::make_tuple(input, output, sequence, owner));
  inputs_.push_back(input);
  outputs_.push_back(output);
  sequences_.push_back(sequence);
}

bool StartedBurst::is_in_turn(std::int64_t turn) const {
  for (std::size_t i = 0; i < planned_->size(); ++i) {
    const auto [first, stride] = planned_->numbers[i];
    if (sequences_[i] != first + turn * stride) return false;
  }
  return true;
}

void StartedBurst::start(std::uint64_t plan, std::uint64_t count) {
  call()->start(inputs_, outputs_, plan, count);
  take_apart_ = {};
}

py::object StartedBurst::go_on(const Rest& rest, DirectCall::Result ended) {
  return rest.of_burst(py::cast(shared_from_this()), static_cast<int>(ended));
}

void StartedBurst::close() {
  const auto take_apart = take_apart_;
  if (take_apart) take_apart();
}

void StartedBurst::wait(std::size_t number) {
  close();
  const py::object left = await();
  if (!left.is_none()) left.attr("wait")(number);
}

bool StartedBurst::poll(std::size_t number) {
  close();
  const py::object left = look();
  return left && (left.is_none() || left.attr("poll")(number).cast<bool>());
}

void StartedBurst::release() {
  const auto take_apart = std::move(take_apart_);
  const auto planned = std::move(planned_);
  const auto parts = std::exchange(parts_, py::list());
}

}  // namespace hvdlite
