// Tensors are asked by the names of torch.Tensor; torch itself is not linked. All of this needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "calls/exchanged_tensor.h"

namespace hvdlite {

// The names are interned once: a lookup by an interned one compares addresses.
inline PyObject* interned(const char* name) {
  PyObject* made = PyUnicode_InternFromString(name);
  if (made == nullptr) throw pybind11::error_already_set();
  return made;
}

inline pybind11::object checked(PyObject* made) {
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

inline pybind11::object attribute(PyObject* tensor, PyObject* name) { return checked(PyObject_GetAttr(tensor, name)); }

inline pybind11::object call(PyObject* tensor, PyObject* method) {
  return checked(PyObject_CallMethodNoArgs(tensor, method));
}

inline std::uint64_t number(const pybind11::object& found) {
  const auto value = PyLong_AsUnsignedLongLong(found.ptr());
  if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

struct Names {
  PyObject* data_ptr = interned("data_ptr");
  PyObject* dtype = interned("dtype");
  PyObject* grad = interned("grad");
  PyObject* is_contiguous = interned("is_contiguous");
  PyObject* is_cpu = interned("is_cpu");
  PyObject* is_neg = interned("is_neg");
  PyObject* itemsize = interned("itemsize");
  PyObject* layout = interned("layout");
  PyObject* numel = interned("numel");
  PyObject* requires_grad = interned("requires_grad");
  PyObject* shape = interned("shape");
  PyObject* untyped_storage = interned("untyped_storage");
  PyObject* version = interned("_version");
};

inline const Names& names() {
  static const Names made;  // while the process lives
  return made;
}

inline std::uintptr_t address_of(pybind11::handle tensor) {
  const auto known = exchanged(tensor.ptr());
  return known ? known->address : number(call(tensor.ptr(), names().data_ptr));
}

}  // namespace hvdlite
