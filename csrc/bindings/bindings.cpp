// The Python module hvdlite._native: arguments, and the GIL released; hvdlite/_native.pyi is its reference page.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/binding_types.h"
#include "bindings/device_bindings.h"
#include "bindings/message_bindings.h"
#include "bindings/nccl_bindings.h"
#include "bindings/plan_bindings.h"
#include "bindings/shortcut_bindings.h"
#include "calls/exchanged_tensor.h"
#include "calls/gradient_snapshot.h"
#include "kernels/elements.h"
#include "kernels/instruction_set.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "kernels/scan.h"
#include "node/file_mapping.h"
#include "node/ordered_exchange.h"
#include "node/places_in_turn.h"
#include "node/small_allreduce.h"
#include "node/small_gather.h"
#include "node/staged_allreduce.h"
#include "waiting/deadline.h"
#include "waiting/heartbeat.h"
#include "waiting/signal.h"
#include "waiting/socket_bell.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

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

void register_exchanged_tensor(py::module_& m) {
  m.def("exchange_tensors_by", &exchange_tensors_by, "table"_a.none(true));
}

void register_gradient_snapshot(py::module_& m) {
  py::class_<GradientSnapshot>(m, "GradientSnapshot")
      .def(py::init<>())
      .def("take", &GradientSnapshot::take, "parameters"_a)
      .def("drop", &GradientSnapshot::drop)
      .def("are_unchanged", &GradientSnapshot::are_unchanged, "parameters"_a)
      .def(
          "locate",
          [](GradientSnapshot& self, TensorList& tensors, const py::type& type, const py::object& layout,
             const py::object& dtype) { return self.locate(tensors, {type.ptr(), layout.ptr(), dtype.ptr()}); },
          "tensors"_a, "type"_a, "layout"_a, "dtype"_a)
      .def("require_grad", &GradientSnapshot::require_grad)
      .def_property_readonly("gradients", &GradientSnapshot::gradients)
      .def_property_readonly("versions", &GradientSnapshot::versions)
      .def_property_readonly("addresses", &GradientSnapshot::addresses);
}

void register_scan(py::module_& m) {
  m.def(
      "first_beyond",
      [](const Addresses& addresses, const Counts& numels, int dtype, double limit) {
        return first_beyond(addresses, numels, static_cast<DType>(dtype), limit);
      },
      "addresses"_a, "numels"_a, "dtype"_a, "limit"_a, WithoutGil());
  m.def("bit_sums", &bit_sums, "addresses"_a, "nbytes"_a, WithoutGil());
}

TensorReduction reduction_of(const TensorList& inputs, const TensorList& outputs, std::uint64_t numel, int dtype,
                             int wire_dtype, int op, double prescale, double postscale) {
  return {inputs,   outputs,  numel, static_cast<DType>(dtype), static_cast<DType>(wire_dtype), static_cast<Op>(op),
          prescale, postscale};
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
      "doorbell_begin_assistance", [](std::uintptr_t address) { doorbell_at(address).begin_assistance(); },
      "address"_a);
  m.def(
      "doorbell_end_assistance",
      [](std::uintptr_t address, std::uint32_t heard) { return doorbell_at(address).end_assistance(heard); },
      "address"_a, "heard"_a);
  m.def(
      "wake_all", [](std::uintptr_t address) { futex_wake_all(atomic_at<std::uint32_t>(address)); }, "address"_a,
      WithoutGil());

  py::class_<Barrier> barrier(m, "Barrier");
  barrier.attr("OK") = static_cast<int>(WaitStatus::kOk);
  barrier.attr("TIMEOUT") = static_cast<int>(WaitStatus::kTimeout);
  barrier.attr("STAGING_WINDOWS") = kStagingWindows;
  barrier.attr("ABORTED") = static_cast<int>(WaitStatus::kAborted);
  barrier.attr("LEFT") = static_cast<int>(WaitStatus::kLeft);
  barrier
      .def(py::init<std::uintptr_t, int, int, std::uintptr_t, int>(), "address"_a, "rank"_a, "size"_a,
           "abort_address"_a, "spin_us"_a)
      .def_static("bytes_needed", &Barrier::bytes_needed, "size"_a)
      .def(
          "wait", [](Barrier& self, double timeout_s) { return static_cast<int>(self.wait(timeout_s)); }, "timeout_s"_a,
          WithoutGil())
      .def("late", &Barrier::late)
      .def("leave", &Barrier::leave)
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
            const auto job = reduction_of(inputs, outputs, numel, dtype, wire_dtype, op, prescale, postscale);
            return static_cast<int>(staged_allreduce(self, {job, staging, window_numel}, timeout_s));
          },
          "inputs"_a, "outputs"_a, "staging"_a, "window_numel"_a, "numel"_a, "dtype"_a, "wire_dtype"_a, "op"_a,
          "prescale"_a, "postscale"_a, "timeout_s"_a, WithoutGil());
}

void register_places_in_turn(py::module_& m) {
  py::class_<PlacesInTurn>(m, "PlacesInTurn")
      .def(py::init<std::uintptr_t, int, int, std::uintptr_t, int>(), "address"_a, "rank"_a, "size"_a,
           "abort_address"_a, "spin_us"_a)
      .def_static("bytes_needed", &PlacesInTurn::bytes_needed, "size"_a)
      .def_property_readonly("most_bytes", [](const PlacesInTurn& self) { return self.most_bytes(); })
      .def("withdraw", &PlacesInTurn::withdraw)
      .def("late", &PlacesInTurn::late)
      .def("wake_all", &PlacesInTurn::wake_all, WithoutGil());

  py::class_<SmallAllreduce> allreduce(m, "SmallAllreduce");
  allreduce.attr("MOST_BYTES_AT_HOME") = SmallAllreduce::kMostBytesAtHome;
  allreduce.def(py::init<PlacesInTurn&>(), "places"_a, py::keep_alive<1, 2>())
      .def(
          "run",
          [](SmallAllreduce& self, const TensorList& inputs, const TensorList& outputs, std::uint64_t numel,
             std::pair<std::uint64_t, std::uint64_t> wanted, int dtype, int wire_dtype, int op, double prescale,
             double postscale, double timeout_s) {
            const auto job = reduction_of(inputs, outputs, numel, dtype, wire_dtype, op, prescale, postscale);
            return static_cast<int>(self.run(job, {wanted.first, wanted.second}, timeout_s));
          },
          "inputs"_a, "outputs"_a, "numel"_a, "wanted"_a, "dtype"_a, "wire_dtype"_a, "op"_a, "prescale"_a,
          "postscale"_a, "timeout_s"_a, WithoutGil());

  using Pieces = std::vector<SmallGather::Piece>;
  py::class_<SmallGather>(m, "SmallGather")
      .def(py::init<PlacesInTurn&>(), "places"_a, py::keep_alive<1, 2>())
      .def_property_readonly("most_numbers", &SmallGather::most_numbers)
      .def("room", &SmallGather::room, "width"_a)
      .def(
          "run",
          [](SmallGather& self, const std::vector<std::int64_t>& numbers, const Pieces& pieces, double timeout_s) {
            const WaitStatus status = self.run(numbers, pieces, timeout_s);
            std::vector<std::vector<std::int64_t>> told;
            for (std::uint32_t rank = 0; status == WaitStatus::kOk && rank < self.size(); ++rank) {
              told.emplace_back(self.numbers(rank), self.numbers(rank) + numbers.size());
            }
            return std::make_pair(static_cast<int>(status), told);
          },
          "numbers"_a, "pieces"_a, "timeout_s"_a, WithoutGil())
      .def("read", &SmallGather::read, "target"_a, "parts"_a, WithoutGil());
}

void register_file_mapping(py::module_& m) {
  m.def(
      "map_file",
      [](std::uintptr_t address, std::size_t bytes, int file, bool is_private) {
        try {
          map_file(address, bytes, file, is_private);
        } catch (const std::system_error& error) {
          errno = error.code().value();
          PyErr_SetFromErrno(PyExc_OSError);
          throw py::error_already_set();
        }
      },
      "address"_a, "bytes"_a, "file"_a, "is_private"_a);
}

void register_ordered_exchange(py::module_& m) {
  using Result = OrderedExchange::Result;
  using Parts = std::vector<OrderedExchange::Part>;
  static_assert(static_cast<int>(Result::kTimeout) == static_cast<int>(WaitStatus::kTimeout));
  static_assert(static_cast<int>(Result::kAborted) == static_cast<int>(WaitStatus::kAborted));
  py::class_<OrderedExchange> exchange(m, "OrderedExchange");
  exchange.attr("OK") = static_cast<int>(Result::kOk);
  exchange.attr("TIMEOUT") = static_cast<int>(Result::kTimeout);
  exchange.attr("ABORTED") = static_cast<int>(Result::kAborted);
  exchange.attr("CONTRADICTION") = static_cast<int>(Result::kContradiction);
  exchange.attr("DEPARTED") = static_cast<int>(Result::kDeparted);
  exchange
      .def(py::init<std::uintptr_t, int, int, std::uintptr_t, int, std::uint64_t, std::uint64_t>(), "address"_a,
           "rank"_a, "size"_a, "abort_address"_a, "spin_us"_a, "window_bytes"_a, "streamed_bytes"_a)
      .def_static("bytes_needed", &OrderedExchange::bytes_needed, "size"_a, "window_bytes"_a)
      .def(
          "meet",
          [](OrderedExchange& self, std::uint64_t card, double timeout_s) {
            return static_cast<int>(self.meet(card, timeout_s));
          },
          "card"_a, "timeout_s"_a, WithoutGil())
      .def(
          "alltoall",
          [](OrderedExchange& self, std::uint64_t card, const Parts& departures, const Parts& arrivals,
             double timeout_s) { return static_cast<int>(self.alltoall(card, departures, arrivals, timeout_s)); },
          "card"_a, "departures"_a, "arrivals"_a, "timeout_s"_a, WithoutGil())
      .def(
          "spread",
          [](OrderedExchange& self, std::uint64_t card, OrderedExchange::Part departure, const Parts& arrivals,
             double timeout_s) { return static_cast<int>(self.spread(card, departure, arrivals, timeout_s)); },
          "card"_a, "departure"_a, "arrivals"_a, "timeout_s"_a, WithoutGil())
      .def(
          "broadcast",
          [](OrderedExchange& self, std::uint64_t card, const TensorList& tensors, std::uint64_t bytes, int root,
             double timeout_s) { return static_cast<int>(self.broadcast(card, tensors, bytes, root, timeout_s)); },
          "card"_a, "tensors"_a, "bytes"_a, "root"_a, "timeout_s"_a, WithoutGil())
      .def(
          "tell",
          [](OrderedExchange& self, std::uint64_t card, const std::vector<std::int64_t>& numbers, double timeout_s) {
            std::vector<std::int64_t> told;
            const Result result = self.tell(card, numbers, told, timeout_s);
            return std::make_pair(static_cast<int>(result), told);
          },
          "card"_a, "numbers"_a, "timeout_s"_a, WithoutGil())
      .def(
          "reduce_scatter",
          [](OrderedExchange& self, std::uint64_t card, const Addresses& inputs, const Counts& numels,
             std::uintptr_t output, int dtype, int op, double prescale, double postscale, double timeout_s) {
            const auto type = static_cast<DType>(dtype);
            const Reducer reducer(type, static_cast<Op>(op), prescale, postscale);
            return static_cast<int>(self.reduce_scatter(card, inputs, numels, output, type, reducer, timeout_s));
          },
          "card"_a, "inputs"_a, "numels"_a, "output"_a, "dtype"_a, "op"_a, "prescale"_a, "postscale"_a, "timeout_s"_a,
          WithoutGil())
      .def_property_readonly("traffic",
                             [](const OrderedExchange& self) {
                               const auto& counts = self.traffic();
                               return std::make_tuple(counts.messages_sent, counts.bytes_sent, counts.messages_received,
                                                      counts.bytes_received);
                             })
      .def("leave", &OrderedExchange::leave)
      .def("late", &OrderedExchange::late)
      .def("departed", &OrderedExchange::departed)
      .def("wake_all", &OrderedExchange::wake_all, WithoutGil());
}

void register_deadline(py::module_& m) {
  py::class_<Deadline>(m, "Deadline")
      .def(py::init<double, std::string, int, std::vector<std::string>, Deadline::Named>(), "seconds"_a, "message"_a,
           "exit_code"_a, "explain"_a = std::vector<std::string>(), "after"_a = Deadline::Named())
      .def("cancel", &Deadline::cancel, WithoutGil());
  m.def("end_at_exit", &end_at_exit, "least"_a);
}

void register_socket_bell(py::module_& m) {
  py::class_<SocketBell>(m, "SocketBell")
      .def(py::init([](const std::vector<int>& sockets, std::uintptr_t address, const py::object&) {
             return std::make_unique<SocketBell>(sockets, doorbell_at(address));
           }),
           "sockets"_a, "address"_a, "memory"_a, py::keep_alive<1, 4>())
      .def("close", &SocketBell::close, WithoutGil());
}

void register_heartbeat(py::module_& m) {
  py::class_<Heartbeat>(m, "Heartbeat")
      .def(py::init([](const std::vector<int>& sockets, double interval_s, const py::bytes& beat) {
             return std::make_unique<Heartbeat>(sockets, interval_s, std::string(beat));
           }),
           "sockets"_a, "interval_s"_a, "beat"_a)
      .def(
          "send",
          [](Heartbeat& self, std::size_t index, const py::bytes& message) { self.send(index, std::string(message)); },
          "index"_a, "message"_a)
      .def("rest", &Heartbeat::rest, "index"_a)
      .def("close", &Heartbeat::close, "patience_s"_a = 0.0, WithoutGil());
}

}  // namespace
}  // namespace hvdlite

PYBIND11_MODULE(_native, m) {
  hvdlite::register_reduce(m);
  hvdlite::register_pack(m);
  hvdlite::register_exchanged_tensor(m);
  hvdlite::register_gradient_snapshot(m);
  hvdlite::register_scan(m);
  hvdlite::register_signal(m);
  hvdlite::register_places_in_turn(m);
  hvdlite::register_plans(m);
  hvdlite::register_shortcut(m);
  hvdlite::register_messages(m);
  hvdlite::register_file_mapping(m);
  hvdlite::register_ordered_exchange(m);
  hvdlite::register_deadline(m);
  hvdlite::register_socket_bell(m);
  hvdlite::register_heartbeat(m);
  hvdlite::register_device(m);
  hvdlite::register_nccl(m);
}
