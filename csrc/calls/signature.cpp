#include "calls/signature.h"

#include <utility>

#include "calls/tensor_attributes.h"

namespace py = pybind11;

namespace hvdlite {

namespace {

bool same_text(PyObject* some, PyObject* other) {
  if (some == other) return true;
  if (!PyUnicode_CheckExact(some) || !PyUnicode_CheckExact(other)) return false;
  return PyUnicode_Compare(some, other) == 0;
}

bool same_number(PyObject* some, PyObject* other) {
  if (some == other) return true;
  return PyFloat_CheckExact(some) && PyFloat_CheckExact(other) && PyFloat_AS_DOUBLE(some) == PyFloat_AS_DOUBLE(other);
}

bool equal(PyObject* some, PyObject* other) {
  const int found = PyObject_RichCompareBool(some, other, Py_EQ);
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

py::object owned(PyObject* borrowed) { return py::reinterpret_borrow<py::object>(borrowed); }

}  // namespace

Signature::Signature(const Arguments& arguments, bool is_empty, py::object home)
    : kind_(owned(arguments.kind)),
      name_(owned(arguments.name)),
      op_(owned(arguments.op)),
      prescale_(owned(arguments.prescale)),
      postscale_(owned(arguments.postscale)),
      type_(owned(reinterpret_cast<PyObject*>(Py_TYPE(arguments.tensor)))),
      dtype_(attribute(arguments.tensor, names().dtype)),
      layout_(attribute(arguments.tensor, names().layout)),
      shape_(attribute(arguments.tensor, names().shape)),
      home_(std::move(home)),
      place_(home_.is_none() ? 0 : address_of(arguments.tensor)),
      is_empty_(is_empty),
      may_be_negated_(number(call(arguments.tensor, names().numel)) == 1) {
  if (const auto tensor = exchanged(arguments.tensor)) {
    exchanged_type_ = tensor->dtype;
    sizes_.assign(tensor->shape, tensor->shape + tensor->dimensions);
  }
}

bool Signature::has_the_name_of(const Arguments& arguments) const {
  return is_named() && same_text(arguments.name, name_.ptr());
}

bool Signature::matches(const Arguments& arguments, std::uintptr_t& address) const {
  PyObject* tensor = arguments.tensor;
  if (arguments.kind != kind_.ptr()) return false;
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != type_.ptr() || arguments.op != op_.ptr()) return false;
  if (!same_text(arguments.name, name_.ptr()) || !same_number(arguments.prescale, prescale_.ptr())) return false;
  if (!same_number(arguments.postscale, postscale_.ptr())) return false;
  try {
    const auto exchanged_tensor = exchanged_type_ == ExchangedType::kUnknown ? std::nullopt : exchanged(tensor);
    if (exchanged_tensor ? !is_like(*exchanged_tensor) : !has_attributes_of(tensor)) return false;
    if (may_be_negated_ && call(tensor, names().is_neg).ptr() == Py_True) return false;
    address = exchanged_tensor ? exchanged_tensor->address : address_of(tensor);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
    return false;
  }
  return (address != 0 || is_empty_) && (home_.is_none() || (address == place_ && !home_().is_none()));
}

bool Signature::is_like(const ExchangedTensor& tensor) const {
  return tensor.dtype == exchanged_type_ && tensor.has_shape(sizes_) && tensor.is_contiguous();
}

bool Signature::has_attributes_of(PyObject* tensor) const {
  return attribute(tensor, names().dtype).ptr() == dtype_.ptr() &&
         attribute(tensor, names().layout).ptr() == layout_.ptr() &&
         attribute(tensor, names().is_cpu).ptr() == Py_True &&
         equal(attribute(tensor, names().shape).ptr(), shape_.ptr()) &&
         call(tensor, names().is_contiguous).ptr() == Py_True;
}

}  // namespace hvdlite
