#include "calls/exchanged_tensor.h"

#include <algorithm>

namespace py = pybind11;

namespace hvdlite {

namespace {

constexpr char kTableName[] = "dlpack_exchange_api";
constexpr std::uint32_t kMajorVersion = 1;
constexpr std::int32_t kHost = 1;
// Signed and unsigned, of 8 bits; torch says so of its types of fewer bits as well.
constexpr ExchangedType kAmbiguous[] = {ExchangedType{0x00010800}, ExchangedType{0x00010801}};

// DLTensor.
struct Described {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dimensions;
  ExchangedType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

// DLPackExchangeAPIHeader: what all versions have.
struct Header {
  std::uint32_t major;
  std::uint32_t minor;
  const Header* previous;  // of an older version
};

// DLPackExchangeAPI.
struct Table {
  Header header;
  void (*unused[3])();  // which make tensors that own, or are owned
  // 0, or -1 with an exception of Python.
  int (*describe)(void* tensor, Described* described);
};

const Table* table = nullptr;  // it lives as long as the process

const Table* table_of(const py::object& capsule) {
  const auto* header = static_cast<const Header*>(PyCapsule_GetPointer(capsule.ptr(), kTableName));
  if (header == nullptr) throw py::error_already_set();
  while (header != nullptr && header->major != kMajorVersion) header = header->previous;
  const auto* found = reinterpret_cast<const Table*>(header);
  return found != nullptr && found->describe != nullptr ? found : nullptr;
}

}  // namespace

std::uint64_t ExchangedTensor::numel() const {
  std::uint64_t product = 1;
  for (std::int32_t i = 0; i < dimensions; ++i) product *= static_cast<std::uint64_t>(shape[i]);
  return product;
}

bool ExchangedTensor::is_contiguous() const {
  std::int64_t expected = 1;
  bool is_dense = true;
  for (std::int32_t i = dimensions - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (shape[i] == 1) continue;  // whose stride says nothing
    is_dense = is_dense && strides[i] == expected;
    expected *= shape[i];
  }
  return is_dense;
}

bool ExchangedTensor::has_shape(const std::vector<std::int64_t>& other) const {
  return other.size() == static_cast<std::size_t>(dimensions) && std::equal(other.begin(), other.end(), shape);
}

void exchange_tensors_by(const py::object& capsule) { table = capsule.is_none() ? nullptr : table_of(capsule); }

std::optional<ExchangedTensor> exchanged(PyObject* tensor) {
  Described found{};
  if (table == nullptr) return {};
  if (table->describe(tensor, &found) != 0) {
    PyErr_Clear();
    return {};
  }
  if (found.device_type != kHost || found.dtype == kAmbiguous[0] || found.dtype == kAmbiguous[1]) return {};
  const auto address = found.data == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(found.data) + found.byte_offset;
  return ExchangedTensor{address, found.dtype, found.dimensions, found.shape, found.strides};
}

}  // namespace hvdlite
