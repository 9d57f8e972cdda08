#include "calls/started.h"

#include <utility>

#include "calls/shortcut.h"

namespace py = pybind11;

namespace hvdlite {

Started::Started(Operation operation, std::shared_ptr<Shortcut> shortcut)
    : operation_(std::move(operation)), shortcut_(std::move(shortcut)), has_waited_(shortcut_->has_waited()) {}

void Started::wait() {
  has_waited_->is_set = true;
  const auto self = shared_from_this();
  if (!is_settled()) shortcut_->complete(self);
  while (!is_settled()) shortcut_->have_settled();  // somebody else is at work
  if (error_) {
    const py::object error = error_.attr("with_traceback")(py::none());  // several threads may raise it
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    throw py::error_already_set();
  }
  const py::object left = left_;
  if (!left.is_none()) left.attr("wait")();
}

bool Started::poll() {
  has_waited_->is_set = true;
  const auto self = shared_from_this();
  if (!is_settled()) {
    if (operation_.call->is_ready(std::chrono::microseconds(0))) {
      shortcut_->complete(self);
    } else if (!shortcut_->is_open() && !shortcut_->is_own_thread_at_work()) {
      shortcut_->have_settled();  // as the job may have failed
    }
    if (!is_settled()) return false;
  }
  const py::object left = left_;
  return left.is_none() || left.attr("poll")().cast<bool>();
}

// What it has referred to goes with who keeps the handle, which may be much later.
void Started::settle(py::object left) {
  left_ = std::move(left);
  const auto shortcut = std::move(shortcut_);
  const auto operation = std::exchange(operation_, {});
}

void Started::fail(py::object error) {
  error_ = std::move(error);
  settle(py::none());
}

}  // namespace hvdlite
