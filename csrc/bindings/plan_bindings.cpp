#include "bindings/plan_bindings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/binding_types.h"
#include "node/ordered_exchange.h"
#include "node/ready_counts.h"
#include "node/small_allreduce.h"
#include "node/small_gather.h"
#include "prepared/prepared_allreduce.h"
#include "prepared/prepared_broadcast.h"
#include "prepared/prepared_gather.h"
#include "prepared/prepared_in_node.h"
#include "prepared/prepared_reduce_scatter.h"
#include "waiting/signal.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

SplitPhaseCall& phases_of(DirectCall& call) {
  SplitPhaseCall* const phases = call.split_phase();
  if (phases == nullptr) throw std::invalid_argument("DirectCall: it has no two phases");
  return *phases;
}

}  // namespace

void register_plans(py::module_& m) {
  py::class_<ReadyCounts> counts(m, "ReadyCounts");
  counts.attr("NEXT_BITS") = ReadyCounts::kNextBits;
  counts
      .def(py::init<std::uintptr_t, std::uintptr_t, int, int>(), "address"_a, "doorbells"_a, "rank"_a, "size"_a)
      // A few loads and stores, and now and then a wake-up, take less time than releasing the GIL.
      .def("set", &ReadyCounts::set, "plan"_a, "count"_a)
      .def("all", &ReadyCounts::all, "plan"_a)
      .def("want_ring", &ReadyCounts::want_ring, "wanted"_a)
      .def("has_news", &ReadyCounts::has_news, "heard"_a)
      .def(
          "wait",
          [](ReadyCounts& self, std::uint64_t plan, std::uint64_t count, std::uint32_t heard, double timeout_s,
             int spin_us) {
            const auto outcome =
                self.await(plan, count, heard, time_after(timeout_s), std::chrono::microseconds(spin_us));
            return outcome != ReadyCounts::Outcome::kNotYet;
          },
          "plan"_a, "count"_a, "heard"_a, "timeout_s"_a, "spin_us"_a, WithoutGil())
      .def(
          "agree",
          [](ReadyCounts& self, std::uint64_t plan, std::uint64_t next, std::uint32_t heard, double timeout_s,
             int spin_us) {
            return self.agree(plan, next, heard, time_after(timeout_s), std::chrono::microseconds(spin_us));
          },
          "plan"_a, "next"_a, "heard"_a, "timeout_s"_a, "spin_us"_a, WithoutGil());

  using Result = DirectCall::Result;
  py::class_<DirectCall> direct(m, "DirectCall");
  direct.attr("DONE") = static_cast<int>(Result::kDone);
  direct.attr("NOT_YET") = static_cast<int>(Result::kNotYet);
  direct.attr("DONE_AND_RUNG") = static_cast<int>(Result::kDoneAndRung);
  direct.attr("TIMEOUT") = static_cast<int>(Result::kTimeout);
  direct.attr("ABORTED") = static_cast<int>(Result::kAborted);
  direct.attr("BEGUN") = static_cast<int>(Result::kBegun);
  direct.def_property_readonly("can_run", &DirectCall::can_run)
      .def_property_readonly("has_two_phases", [](DirectCall& self) { return self.split_phase() != nullptr; })
      .def_property_readonly("result_rows", &DirectCall::result_rows)
      .def(
          "run",
          [](DirectCall& self, const Addresses& inputs, const Addresses& outputs, std::uint64_t plan,
             std::uint64_t count,
             std::uint32_t heard) { return static_cast<int>(self.run(inputs, outputs, plan, count, heard)); },
          "inputs"_a, "outputs"_a, "plan"_a, "count"_a, "heard"_a, WithoutGil())
      .def(
          "start",
          [](DirectCall& self, const Addresses& inputs, const Addresses& outputs, std::uint64_t plan,
             std::uint64_t count) { phases_of(self).start(inputs, outputs, plan, count); },
          "inputs"_a, "outputs"_a, "plan"_a, "count"_a, WithoutGil())
      .def(
          "complete",
          [](DirectCall& self, std::uint32_t heard) { return static_cast<int>(phases_of(self).complete(heard)); },
          "heard"_a, WithoutGil())
      .def(
          "complete_now", [](DirectCall& self) { return static_cast<int>(phases_of(self).complete_now()); },
          WithoutGil())
      .def("last", [](const DirectCall& self) {
        const auto& last = self.last();
        return std::make_tuple(last.plan, last.count, static_cast<int>(last.result));
      });

  py::class_<Patience>(m, "Patience")
      .def(py::init([](int spin_us, double patience_s, double timeout_s) {
             return Patience{std::chrono::microseconds(spin_us), patience_s, timeout_s};
           }),
           "spin_us"_a, "patience_s"_a, "timeout_s"_a);

  py::class_<Windows>(m, "Windows")
      .def(py::init([](OrderedExchange& exchange, std::uint64_t card) { return Windows{exchange, card}; }),
           "exchange"_a, "card"_a, py::keep_alive<1, 2>());

  py::class_<PreparedInNode, DirectCall>(m, "PreparedInNode").def("ready_ns", [](const PreparedInNode& self) {
    return nanoseconds_of(self.ready());
  });

  py::class_<PreparedAllreduce, PreparedInNode>(m, "PreparedAllreduce")
      .def(py::init([](Barrier& barrier, SmallAllreduce& small, ReadyCounts& counts, Counts numels, Counts offsets,
                       std::uint64_t numel, Addresses memory, std::uint64_t window_numel, int dtype, int wire_dtype,
                       int op, double prescale, double postscale, Patience patience) {
             AllreduceShape shape{std::move(numels),
                                  std::move(offsets),
                                  numel,
                                  std::move(memory),
                                  window_numel,
                                  static_cast<DType>(dtype),
                                  static_cast<DType>(wire_dtype),
                                  static_cast<Op>(op),
                                  prescale,
                                  postscale};
             return std::make_unique<PreparedAllreduce>(barrier, small, counts, std::move(shape), patience);
           }),
           "barrier"_a, "small"_a, "counts"_a, "numels"_a, "offsets"_a, "numel"_a, "memory"_a, "window_numel"_a,
           "dtype"_a, "wire_dtype"_a, "op"_a, "prescale"_a, "postscale"_a, "patience"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>());

  py::class_<PreparedReduceScatter, PreparedInNode>(m, "PreparedReduceScatter")
      .def(py::init([](SmallAllreduce& small, Windows& windows, ReadyCounts& counts, Counts numels, int dtype,
                       int wire_dtype, int op, double prescale, double postscale, Patience patience) {
             ReduceScatterShape shape{std::move(numels),
                                      static_cast<DType>(dtype),
                                      static_cast<DType>(wire_dtype),
                                      static_cast<Op>(op),
                                      prescale,
                                      postscale};
             return std::make_unique<PreparedReduceScatter>(small, windows, counts, std::move(shape), patience);
           }),
           "small"_a, "windows"_a, "counts"_a, "numels"_a, "dtype"_a, "wire_dtype"_a, "op"_a, "prescale"_a,
           "postscale"_a, "patience"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>());

  py::class_<PreparedGather, PreparedInNode>(m, "PreparedGather")
      .def(py::init([](SmallGather& gather, Windows& windows, ReadyCounts& counts, std::vector<std::int64_t> numbers,
                       std::size_t column, std::uint64_t row_bytes, bool is_alltoall, Patience patience) {
             GatherShape shape{std::move(numbers), column, row_bytes, is_alltoall};
             return std::make_unique<PreparedGather>(gather, windows, counts, std::move(shape), patience);
           }),
           "gather"_a, "windows"_a, "counts"_a, "numbers"_a, "column"_a, "row_bytes"_a, "is_alltoall"_a, "patience"_a,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>());

  py::class_<PreparedBroadcast, PreparedInNode>(m, "PreparedBroadcast")
      .def(py::init<Windows&, ReadyCounts&, std::uint64_t, std::uint32_t, Patience>(), "windows"_a, "counts"_a,
           "bytes"_a, "root"_a, "patience"_a, py::keep_alive<1, 2>(), py::keep_alive<1, 3>());

  py::class_<PreparedBarrier, PreparedInNode>(m, "PreparedBarrier")
      .def(py::init<ReadyCounts&, Patience>(), "counts"_a, "patience"_a, py::keep_alive<1, 2>());
}

}  // namespace hvdlite
