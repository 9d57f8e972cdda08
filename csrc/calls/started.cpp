#include "calls/started.h"

#include <utility>

#include "calls/shortcut.h"

namespace py = pybind11;

namespace hvdlite {

py::object Rest::of(const Operation& operation, DirectCall::Result ended) const {
  return of_operation(operation.prepared, operation.sequence, operation.input, operation.output, operation.owner,
                      static_cast<int>(ended));
}

Started::Started(SplitPhaseCall* call, std::shared_ptr<Shortcut> shortcut)
    : call_(call), shortcut_(std::move(shortcut)), has_waited_(shortcut_->has_waited()) {}

py::object Started::await() {
  has_waited_->is_set = true;
  const auto self = shared_from_this();
  if (!is_settled()) shortcut_->complete(self);
  while (!is_settled()) shortcut_->have_settled();  // somebody else is at work
  if (error_) {
    const py::object error = error_.attr("with_traceback")(py::none());  // several threads may raise it
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    throw py::error_already_set();
  }
  return left_;
}

py::object Started::look() {
  has_waited_->is_set = true;
  const auto self = shared_from_this();
  if (!is_settled()) {
    if (call_->is_ready(std::chrono::microseconds(0))) {
      shortcut_->complete(self);
    } else if (!shortcut_->is_open() && !shortcut_->is_own_thread_at_work()) {
      shortcut_->have_settled();  // as the job may have failed
    }
  }
  return left_;
}

void Started::settle(py::object left) {
  left_ = std::move(left);
  const auto shortcut = std::move(shortcut_);
  release();
}

void Started::fail(py::object error) {
  error_ = std::move(error);
  settle(py::none());
}

StartedOperation::StartedOperation(Operation operation, std::shared_ptr<Shortcut> shortcut)
    : Started(operation.call, std::move(shortcut)), operation_(std::move(operation)) {}

void StartedOperation::wait() {
  const py::object left = await();
  if (!left.is_none()) left.attr("wait")();
}

bool StartedOperation::poll() {
  const py::object left = look();
  return left && (left.is_none() || left.attr("poll")().cast<bool>());
}

}  // namespace hvdlite
