#include "calls/gradient_snapshot.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>

#include "calls/tensor_attributes.h"

namespace py = pybind11;

namespace hvdlite {

namespace {

py::object gradient_of(py::handle parameter) { return attribute(parameter.ptr(), names().grad); }

std::uint64_t version_of(const py::object& gradient) {
  return gradient.is_none() ? 0 : number(attribute(gradient.ptr(), names().version));
}

// Whether it reads as minus what is there, as of contiguous tensors only one of one element may.
bool is_negated(PyObject* gradient, std::uint64_t numel) {
  return numel == 1 && call(gradient, names().is_neg).ptr() == Py_True;
}

// Whether two tensors, of such a layout at these places, have some memory in common.
bool overlap(const std::vector<std::uintptr_t>& addresses, const TensorList& layout, std::uint64_t item_bytes) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> places;  // begin, end
  places.reserve(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const std::uint64_t numel = layout.end(i) - layout.begin(i);
    if (numel > 0) places.emplace_back(addresses[i], addresses[i] + numel * item_bytes);
  }
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end(),
                            [](const auto& one, const auto& next) { return next.first < one.second; }) != places.end();
}

// Looks at gradients of a kind.
class Search {
 public:
  explicit Search(const TensorKind& kind) : kind_(kind) {}

  // Where it lies, if it is of that kind, of as many elements, and as it would be in a buffer.
  std::optional<std::uintptr_t> find(PyObject* gradient, std::uint64_t numel) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(gradient)) != kind_.type) return {};  // it may be None
    const auto known = exchanged(gradient);
    if (known && dtype_ != ExchangedType::kUnknown) {
      if (known->dtype != dtype_ || known->numel() != numel || !known->is_contiguous()) return {};
    } else if (!is_such_by_attributes(gradient, numel)) {
      return {};
    } else if (known) {
      dtype_ = known->dtype;  // what is asked of the others
    }
    if (is_negated(gradient, numel)) return {};
    return known ? known->address : address_of(gradient);
  }

 private:
  bool is_such_by_attributes(PyObject* gradient, std::uint64_t numel) const {
    return attribute(gradient, names().layout).ptr() == kind_.layout &&
           attribute(gradient, names().dtype).ptr() == kind_.dtype &&
           call(gradient, names().is_contiguous).ptr() == Py_True && number(call(gradient, names().numel)) == numel;
  }

  const TensorKind kind_;
  ExchangedType dtype_ = ExchangedType::kUnknown;
};

}  // namespace

void GradientSnapshot::take(const py::list& parameters) {
  std::vector<py::object> gradients;
  std::vector<std::uint64_t> versions;
  gradients.reserve(parameters.size());
  versions.reserve(parameters.size());
  for (const py::handle parameter : parameters) {
    gradients.push_back(gradient_of(parameter));
    versions.push_back(version_of(gradients.back()));
  }
  addresses_.clear();
  gradients_.swap(gradients);  // what was there before goes last: it may run code of Python
  versions_.swap(versions);
}

void GradientSnapshot::drop() {
  const std::vector<py::object> dropped = std::move(gradients_);
  gradients_.clear();
  versions_.clear();
  addresses_.clear();
}

bool GradientSnapshot::are_unchanged(const py::list& parameters) const {
  if (parameters.size() != gradients_.size()) throw std::invalid_argument("GradientSnapshot: of other parameters");
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const py::object now = gradient_of(parameters[i]);
    if (!now.is(gradients_[i]) || version_of(now) != versions_[i]) return false;
    if (!addresses_.empty() && address_of(now) != addresses_[i]) return false;
  }
  return true;
}

bool GradientSnapshot::locate(TensorList& tensors, const TensorKind& kind) {
  if (tensors.size() != gradients_.size()) {
    throw std::invalid_argument("GradientSnapshot: a tensor per gradient is needed");
  }
  std::vector<std::uintptr_t> addresses;
  addresses.reserve(gradients_.size());
  Search search(kind);
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const auto address = search.find(gradients_[i].ptr(), tensors.end(i) - tensors.begin(i));
    if (!address) return false;
    addresses.push_back(*address);
  }
  if (overlap(addresses, tensors, number(attribute(kind.dtype, names().itemsize)))) return false;
  tensors.move_to(addresses);
  addresses_ = std::move(addresses);
  return true;
}

bool GradientSnapshot::require_grad() const {
  for (const py::object& gradient : gradients_) {
    if (!gradient.is_none() && attribute(gradient.ptr(), names().requires_grad).ptr() == Py_True) return true;
  }
  return false;
}

}  // namespace hvdlite
