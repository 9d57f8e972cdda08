// The Python module hvdlite._native: arguments, and the GIL released; hvdlite/_native.pyi is its reference page.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "deadline.h"
#include "device_bindings.h"
#include "elements.h"
#include "instruction_set.h"
#include "nccl_bindings.h"
#include "pack.h"
#include "reduce.h"
#include "signal.h"
#include "socket_bell.h"
#include "staged_allreduce.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::uint64_t>;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

void register_reduce(py::module_& m) {
  m.def("instruction_set", &instruction_set_name);
  m.def("use_instruction_set", &use_instruction_set, "name"_a);
  m.def(
      "reduce",
      [](const Addresses& destinations, const Addresses& sources, std::uint64_t numel, int dtype, int op,
         double prescale, double postscale) {
        if (sources.empty()) throw std::invalid_argument("reduce: at least one source is needed");
        const Reducer reducer(static_cast<DType>(dtype), static_cast<Op>(op), prescale, postscale);
        reducer.reduce(destinations, sources, 0, numel);
      },
      "destinations"_a, "sources"_a, "numel"_a, "dtype"_a, "op"_a, "prescale"_a = 1.0, "postscale"_a = 1.0,
      WithoutGil());
  m.def(
      "copy",
      [](std::uintptr_t destination, std::uintptr_t source, std::uint64_t nbytes) {
        if (nbytes == 0) return;  // nothing has the address 0, which memcpy must not be given
        std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), nbytes);
      },
      "destination"_a, "source"_a, "nbytes"_a, WithoutGil());
}

void register_pack(py::module_& m) {
  py::class_<TensorList>(m, "TensorList")
      .def(py::init<Addresses, const Counts&, Counts>(), "addresses"_a, "numels"_a, "offsets"_a)
      .def(
          "pack",
          [](const TensorList& self, std::uintptr_t destination, std::uint64_t begin, std::uint64_t end, int from_dtype,
             int to_dtype, double scale) {
            self.pack(destination, begin, end, static_cast<DType>(from_dtype), static_cast<DType>(to_dtype), scale);
          },
          "destination"_a, "begin"_a, "end"_a, "from_dtype"_a, "to_dtype"_a, "scale"_a = 1.0, WithoutGil())
      .def(
          "unpack",
          [](const TensorList& self, std::uintptr_t source, std::uint64_t begin, std::uint64_t end, int from_dtype,
             int to_dtype, double scale) {
            self.unpack(source, begin, end, static_cast<DType>(from_dtype), static_cast<DType>(to_dtype), scale);
          },
          "source"_a, "begin"_a, "end"_a, "from_dtype"_a, "to_dtype"_a, "scale"_a = 1.0, WithoutGil());
}

Doorbell& doorbell_at(std::uintptr_t address) { return *reinterpret_cast<Doorbell*>(address); }

template <class WaitOnce>
std::uint32_t wait_without_gil(std::uint32_t seen, double timeout_s, WaitOnce wait_once) {
  const auto until = time_after(timeout_s);
  while (true) {
    std::uint32_t now;
    {
      const py::gil_scoped_release without_gil;
      now = wait_once(until);
    }
    if (now != seen || Clock::now() >= until) return now;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C ends a wait of the main thread
  }
}

std::uint32_t doorbell_wait(std::uintptr_t address, std::uint32_t seen, double timeout_s) {
  return wait_without_gil(seen, timeout_s,
                          [&](Clock::time_point until) { return doorbell_at(address).wait_once(seen, until); });
}

std::uint32_t doorbell_assist(std::uintptr_t address, std::uint32_t seen, double timeout_s, int spin_us) {
  const std::chrono::microseconds spin(spin_us);
  return wait_without_gil(seen, timeout_s,
                          [&](Clock::time_point until) { return doorbell_at(address).assist_once(seen, until, spin); });
}

void register_signal(py::module_& m) {
  // One load or store takes less time than releasing the GIL, so these keep it.
  m.def("load32", &load<std::uint32_t>, "address"_a);
  m.def("load64", &load<std::uint64_t>, "address"_a);
  m.def("store32", &store<std::uint32_t>, "address"_a, "value"_a);
  m.def("store64", &store<std::uint64_t>, "address"_a, "value"_a);
  m.def("doorbell_ring", [](std::uintptr_t address) { doorbell_at(address).ring(); }, "address"_a, WithoutGil());
  m.def("doorbell_wait", &doorbell_wait, "address"_a, "seen"_a, "timeout_s"_a);
  m.def("doorbell_assist", &doorbell_assist, "address"_a, "seen"_a, "timeout_s"_a, "spin_us"_a);
  m.def(
      "doorbell_begin_assistance", [](std::uintptr_t address) { doorbell_at(address).assistants.store(1); },
      "address"_a);
  m.def(
      "doorbell_end_assistance", [](std::uintptr_t address) { return doorbell_at(address).end_assistance(); },
      "address"_a);
  m.def(
      "wake_all", [](std::uintptr_t address) { futex_wake_all(atomic_at<std::uint32_t>(address)); }, "address"_a,
      WithoutGil());

  py::class_<Barrier> barrier(m, "Barrier");
  barrier.attr("OK") = static_cast<int>(WaitStatus::kOk);
  barrier.attr("TIMEOUT") = static_cast<int>(WaitStatus::kTimeout);
  barrier.attr("STAGING_WINDOWS") = kStagingWindows;
  barrier.attr("ABORTED") = static_cast<int>(WaitStatus::kAborted);
  barrier
      .def(py::init<std::uintptr_t, int, int, std::uintptr_t, int>(), "address"_a, "rank"_a, "size"_a,
           "abort_address"_a, "spin_us"_a)
      .def_static("bytes_needed", &Barrier::bytes_needed, "size"_a)
      .def(
          "wait", [](Barrier& self, double timeout_s) { return static_cast<int>(self.wait(timeout_s)); }, "timeout_s"_a,
          WithoutGil())
      .def("late", &Barrier::late)
      .def(
          "allreduce",
          [](Barrier& self, const Addresses& copies, std::uint64_t numel, int dtype, int op, double prescale,
             double postscale, double timeout_s) {
            return static_cast<int>(self.allreduce(copies, numel, static_cast<DType>(dtype), static_cast<Op>(op),
                                                   prescale, postscale, timeout_s));
          },
          "copies"_a, "numel"_a, "dtype"_a, "op"_a, "prescale"_a, "postscale"_a, "timeout_s"_a, WithoutGil())
      .def(
          "staged_allreduce",
          [](Barrier& self, const TensorList& inputs, const TensorList& outputs, const Addresses& staging,
             std::uint64_t window_numel, std::uint64_t numel, int dtype, int wire_dtype, int op, double prescale,
             double postscale, double timeout_s) {
            const StagedAllreduce job{inputs,
                                      outputs,
                                      staging,
                                      window_numel,
                                      numel,
                                      static_cast<DType>(dtype),
                                      static_cast<DType>(wire_dtype),
                                      static_cast<Op>(op),
                                      prescale,
                                      postscale};
            return static_cast<int>(staged_allreduce(self, job, timeout_s));
          },
          "inputs"_a, "outputs"_a, "staging"_a, "window_numel"_a, "numel"_a, "dtype"_a, "wire_dtype"_a, "op"_a,
          "prescale"_a, "postscale"_a, "timeout_s"_a, WithoutGil());
}

void register_deadline(py::module_& m) {
  py::class_<Deadline>(m, "Deadline")
      .def(py::init<double, std::string, int>(), "seconds"_a, "message"_a, "exit_code"_a)
      .def("cancel", &Deadline::cancel, WithoutGil());
}

void register_socket_bell(py::module_& m) {
  py::class_<SocketBell>(m, "SocketBell")
      .def(py::init([](const std::vector<int>& sockets, std::uintptr_t address, const py::object&) {
             return std::make_unique<SocketBell>(sockets, doorbell_at(address));
           }),
           "sockets"_a, "address"_a, "memory"_a, py::keep_alive<1, 4>())
      .def("close", &SocketBell::close, WithoutGil());
}

}  // namespace
}  // namespace hvdlite

PYBIND11_MODULE(_native, m) {
  hvdlite::register_reduce(m);
  hvdlite::register_pack(m);
  hvdlite::register_signal(m);
  hvdlite::register_deadline(m);
  hvdlite::register_socket_bell(m);
  hvdlite::register_device(m);
  hvdlite::register_nccl(m);
}
