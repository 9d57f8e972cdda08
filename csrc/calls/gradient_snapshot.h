// What the gradients of many parameters were, by one call instead of some lookups in Python for each.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "kernels/pack.h"

namespace hvdlite {

// What torch says of a tensor, borrowed.
struct TensorKind {
  PyObject* type;
  PyObject* layout;
  PyObject* dtype;
};

// All methods need the GIL. Parameters are passed to each, always the same: whoever calls owns them, so that Python's
// collector of garbage sees all references to what has hooks.
class GradientSnapshot {
 public:
  // Note each parameter's gradient, and how often it was changed in place.
  void take(const pybind11::list& parameters);

  // Keep no gradient alive.
  void drop();

  // Whether each gradient is what it was, and lies where it did if `locate` has found it: `p.grad.data = ...` changes
  // neither tensor nor version.
  bool are_unchanged(const pybind11::list& parameters) const;

  // Move `tensors` to where the noted gradients lie. False, and nothing is moved, unless each is of that kind, without
  // gaps, of as many elements, not negated, and in memory that no other one has.
  bool locate(TensorList& tensors, const TensorKind& kind);

  // Whether a graph leads to one of the noted gradients.
  bool require_grad() const;

  const std::vector<pybind11::object>& gradients() const { return gradients_; }
  const std::vector<std::uint64_t>& versions() const { return versions_; }
  // As `locate` has found them; else empty.
  const std::vector<std::uintptr_t>& addresses() const { return addresses_; }

 private:
  std::vector<pybind11::object> gradients_;  // None where one was missing
  std::vector<std::uint64_t> versions_;
  std::vector<std::uintptr_t> addresses_;
};

}  // namespace hvdlite
