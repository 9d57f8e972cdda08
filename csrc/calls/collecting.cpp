#include "calls/collecting.h"

#include <iterator>
#include <utility>

#include "calls/tensor_attributes.h"

namespace py = pybind11;

namespace hvdlite {

Collecting::Collecting(py::object lock, py::object open, py::object complete)
    : lock_(std::move(lock)), open_(std::move(open)), complete_(std::move(complete)) {}

void Collecting::follow(std::vector<Known> known) {
  known_.swap(known);  // what it refers to may run code of Python when it goes
}

void Collecting::begin(py::object burst, py::list parts, std::shared_ptr<const Signatures> signatures) {
  burst_ = std::move(burst);
  parts_ = std::move(parts);
  signatures_ = std::move(signatures);
}

void Collecting::end() {
  burst_ = {};
  signatures_ = nullptr;
}

// Of what comes next.
const Signature* Collecting::expected() const {
  if (signatures_ == nullptr || parts_.size() >= signatures_->by_place.size()) return nullptr;
  return signatures_->by_place[parts_.size()].get();
}

// Whether a burst is open now, as one may come that begins so.
bool Collecting::open_for(const Arguments& arguments) {
  for (std::size_t i = 0; i < known_.size(); ++i) {
    const Known known = known_[i];  // others may be followed while we look
    const auto& first = known.signatures->by_place.front();
    std::uintptr_t address = 0;
    if (first != nullptr && first->matches(arguments, address)) return open_(known.known).ptr() == Py_True;
  }
  return false;
}

py::object Collecting::take(const Arguments& arguments, bool in_place, const Maker& maker) {
  if (signatures_ == nullptr && !open_for(arguments)) return {};
  const Signature* const signature = expected();
  if (signature == nullptr) return {};
  const auto signatures = signatures_;  // it may end while we look
  std::uintptr_t source = 0;
  if (!signature->matches(arguments, source)) return {};
  const py::handle tensor(arguments.tensor);
  auto result = py::reinterpret_borrow<py::object>(tensor);
  std::uintptr_t target = source;
  if (!in_place) {
    result = maker.new_like(tensor);
    target = address_of(result);
  }
  // As it is now, should `tensor.set_()` bring another.
  py::object owner = call(arguments.tensor, names().untyped_storage);
  if (!in_place) owner = py::make_tuple(owner, result);

  // From here on no Python runs until it is taken.
  static PyObject* const locked = interned("locked");
  if (expected() != signature || call(lock_.ptr(), locked).ptr() != Py_False) return {};
  const py::object burst = burst_;
  const py::int_ place(parts_.size());
  parts_.append(py::make_tuple(source, target, signature->is_named() ? maker.named : maker.unnamed->next++, owner));
  PyObject* const made_of[] = {burst.ptr(), place.ptr(), result.ptr(), arguments.name};
  py::object handle = checked(PyObject_Vectorcall(maker.make_handle.ptr(), made_of, std::size(made_of), nullptr));
  if (signatures_ == signatures && parts_.size() == signatures->by_place.size()) complete_(burst);
  return handle;
}

}  // namespace hvdlite
