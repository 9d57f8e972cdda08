#include "bindings/nccl_bindings.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/binding_types.h"
#include "gpu/device_memory.h"
#include "gpu/nccl_communicator.h"
#include "gpu/nccl_library.h"
#include "kernels/elements.h"
#include "waiting/signal.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {

void register_nccl(py::module_& m) {
  using Self = NcclCommunicator;
  const auto status = [](WaitStatus value) { return static_cast<int>(value); };
  m.def("use_nccl_library", &nccl::use_library, "path"_a);
  m.def(
      "load_nccl",
      [](const std::vector<std::string>& wheels) {
        const nccl::Library& library = nccl::load(wheels);
        return std::make_pair(library.path, library.version_code);
      },
      "wheels"_a, WithoutGil());
  py::class_<Self> communicator(m, "NcclCommunicator");
  communicator.attr("UNREGISTERED") = static_cast<int>(Registration::kNone);
  communicator.attr("BUFFER") = static_cast<int>(Registration::kBuffer);
  communicator.attr("WINDOW") = static_cast<int>(Registration::kWindow);
  communicator.def_static(
                  "unique_id", [](int device) { return py::bytes(Self::unique_id(device)); }, "device"_a)
      .def(py::init<int, const std::string&, int, int>(), "device"_a, "unique_id"_a, "rank"_a, "size"_a, WithoutGil())
      .def(
          "settle", [=](Self& self, double timeout_s) { return status(self.settle(timeout_s)); }, "timeout_s"_a,
          WithoutGil())
      .def(
          "all_reduce",
          [=](Self& self, std::uintptr_t address, std::uint64_t numel, int dtype, int op, std::uintptr_t stream,
              double timeout_s) {
            return status(
                self.all_reduce(address, numel, static_cast<DType>(dtype), static_cast<Op>(op), stream, timeout_s));
          },
          "address"_a, "numel"_a, "dtype"_a, "op"_a, "stream"_a, "timeout_s"_a, WithoutGil())
      .def(
          "reduce_scatter",
          [=](Self& self, std::uintptr_t address, std::uint64_t block_numel, int dtype, int op, std::uintptr_t stream,
              double timeout_s) {
            return status(self.reduce_scatter(address, block_numel, static_cast<DType>(dtype), static_cast<Op>(op),
                                              stream, timeout_s));
          },
          "address"_a, "block_numel"_a, "dtype"_a, "op"_a, "stream"_a, "timeout_s"_a, WithoutGil())
      .def(
          "all_gather",
          [=](Self& self, std::uintptr_t address, std::uint64_t block_nbytes, std::uintptr_t stream, double timeout_s) {
            return status(self.all_gather(address, block_nbytes, stream, timeout_s));
          },
          "address"_a, "block_nbytes"_a, "stream"_a, "timeout_s"_a, WithoutGil())
      .def(
          "reduce",
          [=](Self& self, const Self::Parts& parts, int dtype, int op, std::uintptr_t stream, double timeout_s) {
            return status(self.reduce(parts, static_cast<DType>(dtype), static_cast<Op>(op), stream, timeout_s));
          },
          "parts"_a, "dtype"_a, "op"_a, "stream"_a, "timeout_s"_a, WithoutGil())
      .def(
          "broadcast",
          [=](Self& self, const Self::Parts& parts, std::uintptr_t stream, double timeout_s) {
            return status(self.broadcast(parts, stream, timeout_s));
          },
          "parts"_a, "stream"_a, "timeout_s"_a, WithoutGil())
      .def(
          "register_memory",
          [=](Self& self, DeviceSegment& segment, std::size_t place, double timeout_s) {
            const auto [found, how] = self.register_memory(segment, place, timeout_s);
            return std::make_pair(status(found), static_cast<int>(how));
          },
          "segment"_a, "place"_a, "timeout_s"_a, WithoutGil())
      .def(
          "wait",
          [=](Self& self, std::uintptr_t stream, double timeout_s) { return status(self.wait(stream, timeout_s)); },
          "stream"_a, "timeout_s"_a, WithoutGil())
      .def("error", &Self::error, WithoutGil())
      .def("abort", &Self::abort, WithoutGil())
      .def("close", &Self::close, "timeout_s"_a, WithoutGil());
}

}  // namespace hvdlite
