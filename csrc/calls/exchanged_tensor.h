// What a tensor is, in one question to its library: by the table of functions of DLPack 1 (dmlc.github.io/dlpack),
// which torch has since 2.11. Its attributes take some 40 ns each.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace hvdlite {

// Of elements: code, bits and lanes, as DLPack lays them out; of no type all are 0.
enum class ExchangedType : std::uint32_t { kUnknown = 0 };

// A tensor in memory of the host that is described by strides; valid until the tensor changes.
struct ExchangedTensor {
  std::uintptr_t address;  // 0 where it is empty
  ExchangedType dtype;
  std::int32_t dimensions;
  const std::int64_t* shape;
  const std::int64_t* strides;  // in elements

  std::uint64_t numel() const;
  bool is_contiguous() const;
  bool has_shape(const std::vector<std::int64_t>& other) const;
};

// The functions below need the GIL.

// From now on tensors are asked by `table`, a type's `__dlpack_c_exchange_api__`; None: by nothing.
void exchange_tensors_by(const pybind11::object& table);

// Null where that is not known, as there is no table, or the tensor is something else. No code of Python runs.
std::optional<ExchangedTensor> exchanged(PyObject* tensor);

}  // namespace hvdlite
