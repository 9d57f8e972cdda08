// What a caller passed for one tensor, and whether another call passes the same: by looking, without a lookup.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "calls/exchanged_tensor.h"

namespace hvdlite {

// Of a call: which operation, the tensor, and what else there is to say; borrowed.
struct Arguments {
  PyObject* kind;
  PyObject* tensor;
  PyObject* name;
  PyObject* op;
  PyObject* prescale;
  PyObject* postscale;
};

// All methods need the GIL.
class Signature {
 public:
  // `is_empty`: so that the tensor may have no address. `home`: a weak reference to the memory that the tensor lives
  // in, where the operation works there: its results would overwrite whoever else does; None: it may come from
  // anywhere.
  Signature(const Arguments& arguments, bool is_empty, pybind11::object home);

  // Whether a call with `arguments` is the same, so that its tensor is contiguous memory of the host, at `address`.
  // Raises what is no Exception; else no error is left.
  bool matches(const Arguments& arguments, std::uintptr_t& address) const;

  bool is_named() const { return !name_.is_none(); }
  bool has_the_name_of(const Arguments& arguments) const;

 private:
  bool is_like(const ExchangedTensor& tensor) const;
  bool has_attributes_of(PyObject* tensor) const;

  pybind11::object kind_;
  pybind11::object name_;
  pybind11::object op_;
  pybind11::object prescale_;
  pybind11::object postscale_;
  pybind11::object type_;
  pybind11::object dtype_;
  pybind11::object layout_;
  pybind11::object shape_;
  ExchangedType exchanged_type_ = ExchangedType::kUnknown;  // as its library does not tell
  std::vector<std::int64_t> sizes_;                         // else its shape
  pybind11::object home_;
  std::uintptr_t place_;  // in that memory
  bool is_empty_;
  bool may_be_negated_;  // as of contiguous tensors only those of one element are, which read as minus what is there
};

// Numbers of the unnamed operations of a kind, from 0 on; under the GIL.
struct Count {
  std::int64_t next = 0;
};

// A truth that native code and Python change alike, under the GIL.
struct Flag {
  bool is_set;
};

// A point in time, in seconds of the steady clock, that native code and Python change alike, under the GIL.
struct Instant {
  double at_s;
};

// Of the operations of a burst, by their places; null where it is not known yet.
struct Signatures {
  std::vector<std::shared_ptr<const Signature>> by_place;

  bool are_known() const { return std::find(by_place.begin(), by_place.end(), nullptr) == by_place.end(); }
};

}  // namespace hvdlite
