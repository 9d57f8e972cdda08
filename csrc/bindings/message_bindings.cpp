#include "bindings/message_bindings.h"

#include <pybind11/stl.h>
#include <sched.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/binding_types.h"
#include "kernels/elements.h"
#include "kernels/reduce.h"
#include "messages/bound_messages.h"
#include "messages/bound_pipeline.h"
#include "messages/early_allreduce.h"
#include "messages/early_gather.h"
#include "messages/early_reduce_scatter.h"
#include "messages/early_turns.h"
#include "messages/packet_room.h"
#include "node/ready_counts.h"
#include "waiting/polite_look.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

// Arguments of a call of `reduce`.
using GivenAddition = std::tuple<Addresses, Addresses, std::uint64_t, int, int, double, double>;

std::vector<BoundMessages::Addition> additions_of(const std::vector<GivenAddition>& given) {
  std::vector<BoundMessages::Addition> additions;
  for (const auto& [destinations, sources, numel, dtype, op, prescale, postscale] : given) {
    const Reducer reducer(static_cast<DType>(dtype), static_cast<Op>(op), prescale, postscale);
    additions.push_back({destinations, sources, numel, reducer});
  }
  return additions;
}

MpiFunctions functions_at(std::uintptr_t start, std::uintptr_t test) {
  return {reinterpret_cast<MpiFunctions::Start>(start), reinterpret_cast<MpiFunctions::Test>(test)};
}

template <class Messages>
int work(Messages& self, PoliteLook& look, int limit_us, int longest_nap_us) {
  using Microseconds = std::chrono::microseconds;
  return static_cast<int>(self.work(look, Microseconds(limit_us), Microseconds(longest_nap_us)));
}

void register_bound_messages(py::module_& m) {
  using Phase = std::tuple<Addresses, std::vector<std::pair<std::uintptr_t, int>>, std::vector<GivenAddition>>;
  py::class_<PoliteLook>(m, "PoliteLook")
      .def(py::init([](int longest_us, int busy_us, int courtesy_us) {
             using Microseconds = std::chrono::microseconds;
             return std::make_unique<PoliteLook>(Microseconds(longest_us), Microseconds(busy_us),
                                                 Microseconds(courtesy_us));
           }),
           "longest_us"_a, "busy_us"_a, "courtesy_us"_a)
      .def(
          "until",
          [](PoliteLook& self, const py::function& happened) {
            const auto offer_core = [] {
              const py::gil_scoped_release without_gil;  // somebody else may need it to compute
              sched_yield();
            };
            return self.until([&] { return happened().cast<bool>(); }, offer_core);
          },
          "happened"_a);

  py::class_<BoundMessages, std::shared_ptr<BoundMessages>> messages(m, "BoundMessages");
  messages.attr("DONE") = static_cast<int>(BoundMessages::Progress::kDone);
  messages.attr("WAITING") = static_cast<int>(BoundMessages::Progress::kWaiting);
  messages.attr("FAILED") = static_cast<int>(BoundMessages::Progress::kFailed);
  messages
      .def(py::init([](std::uintptr_t start, std::uintptr_t test, const std::vector<Phase>& given) {
             std::vector<BoundMessages::Phase> phases;
             for (const auto& [starts, waits, additions] : given) {
               BoundMessages::Phase phase{starts, {}, additions_of(additions)};
               for (const auto& [request, peer] : waits) phase.waits.push_back({request, peer});
               phases.push_back(std::move(phase));
             }
             return std::make_shared<BoundMessages>(functions_at(start, test), std::move(phases));
           }),
           "start"_a, "test"_a, "phases"_a)
      .def(
          "start", [](BoundMessages& self) { return static_cast<int>(self.start()); }, WithoutGil())
      .def(
          "advance", [](BoundMessages& self) { return static_cast<int>(self.advance()); }, WithoutGil())
      .def("work", work<BoundMessages>, "look"_a, "limit_us"_a, "longest_nap_us"_a, WithoutGil())
      .def("close", &BoundMessages::close)
      .def_property_readonly("peer", &BoundMessages::peer)
      .def_property_readonly("moved", &BoundMessages::moved)
      .def_property_readonly("error", &BoundMessages::error);
}

void register_bound_pipeline(py::module_& m) {
  using Send = std::tuple<std::uintptr_t, int, std::size_t>;
  using Receive = std::tuple<std::uintptr_t, int, std::size_t, bool, std::vector<GivenAddition>>;
  py::class_<BoundPipeline>(m, "BoundPipeline")
      .def(py::init([](std::uintptr_t start, std::uintptr_t test, const std::vector<GivenAddition>& first,
                       const std::vector<Send>& given_sends, const std::vector<Receive>& given_receives,
                       std::size_t window) {
             std::vector<BoundPipeline::Send> sends;
             for (const auto& [request, peer, after] : given_sends) sends.push_back({request, peer, after});
             std::vector<BoundPipeline::Receive> receives;
             for (const auto& [request, peer, after, has_slot, additions] : given_receives) {
               receives.push_back({request, peer, after, has_slot, additions_of(additions)});
             }
             return std::make_unique<BoundPipeline>(functions_at(start, test), additions_of(first), std::move(sends),
                                                    std::move(receives), window);
           }),
           "start"_a, "test"_a, "first"_a, "sends"_a, "receives"_a, "window"_a)
      .def(
          "start", [](BoundPipeline& self) { return static_cast<int>(self.start()); }, WithoutGil())
      .def("work", work<BoundPipeline>, "look"_a, "limit_us"_a, "longest_nap_us"_a, WithoutGil())
      .def_property_readonly("peer", &BoundPipeline::peer)
      .def_property_readonly("moved", &BoundPipeline::moved)
      .def_property_readonly("error", &BoundPipeline::error);
}

void register_early_allreduce(py::module_& m) {
  using Progress = EarlyAllreduce::Progress;
  py::class_<EarlyTurns>(m, "EarlyTurns")
      .def(py::init<const ReadyCounts&, std::uintptr_t>(), "counts"_a, "address"_a, py::keep_alive<1, 2>())
      .def_static("bytes_needed", &EarlyTurns::bytes_needed, "size"_a)
      .def("begin", &EarlyTurns::begin)
      .def("all_have_begun", &EarlyTurns::all_have_begun)
      .def("bring", &EarlyTurns::bring)
      .def("has_come", &EarlyTurns::has_come);

  using Reduction = std::tuple<int, double, double>;
  py::class_<EarlyShape>(m, "EarlyShape")
      .def(py::init([](Counts numels, Counts offsets, std::uint64_t numel, Addresses places, std::uint32_t rank,
                       int dtype, int wire_dtype, const std::optional<Reduction>& in_node) {
             const auto wire = static_cast<DType>(wire_dtype);
             EarlyShape shape{std::move(numels),
                              std::move(offsets),
                              numel,
                              std::move(places),
                              rank,
                              static_cast<DType>(dtype),
                              wire,
                              {}};
             if (in_node) {
               const auto& [op, prescale, postscale] = *in_node;
               shape.in_node.emplace(wire, static_cast<Op>(op), prescale, postscale);
             }
             return shape;
           }),
           "numels"_a, "offsets"_a, "numel"_a, "places"_a, "rank"_a, "dtype"_a, "wire_dtype"_a, "in_node"_a);

  py::class_<EarlyAllreduce, DirectCall> early(m, "EarlyAllreduce");
  early.attr("NODE_IS_LATE") = static_cast<int>(Progress::kNodeIsLate);
  early
      .def(py::init([](ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, const EarlyShape& shape, int spin_us,
                       double patience_s) {
             const std::chrono::microseconds spin(spin_us);
             return std::make_unique<EarlyAllreduce>(counts, turns, look, shape, spin, patience_s);
           }),
           "counts"_a, "turns"_a, "look"_a, "shape"_a, "spin_us"_a, "patience_s"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def("bind", &EarlyAllreduce::bind, "messages"_a)
      .def_property_readonly("progress", [](const EarlyAllreduce& self) { return static_cast<int>(self.progress()); })
      .def_property_readonly("began_ns", [](const EarlyAllreduce& self) { return nanoseconds_of(self.began()); })
      .def_property_readonly("outputs", &EarlyAllreduce::outputs, py::return_value_policy::reference_internal)
      .def_property_readonly("has_news", &EarlyAllreduce::has_news);

  py::class_<PacketRoom>(m, "PacketRoom")
      .def(py::init())
      .def_property_readonly("now", &PacketRoom::now)
      .def_static("enough_for", &PacketRoom::enough_for, "bytes"_a)
      .def("note", &PacketRoom::note, "bytes"_a)
      .def("forget", &PacketRoom::forget);

  using Places = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t, std::uint64_t>;
  py::class_<EarlyGather, EarlyAllreduce>(m, "EarlyGather")
      .def(py::init([](ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, const EarlyShape& shape, int spin_us,
                       double patience_s, std::vector<std::int64_t> numbers, std::size_t column,
                       std::uint64_t row_bytes, bool is_alltoall, std::uint32_t job_rank, const Places& packets,
                       PacketRoom& room, std::uint64_t room_then) {
             const std::chrono::microseconds spin(spin_us);
             GatherShape rows{std::move(numbers), column, row_bytes, is_alltoall};
             const auto& [own, all, bytes, beside] = packets;
             return std::make_unique<EarlyGather>(counts, turns, look, shape, spin, patience_s, std::move(rows),
                                                  job_rank, PacketPlaces{own, all, bytes, beside}, room, room_then);
           }),
           "counts"_a, "turns"_a, "look"_a, "shape"_a, "spin_us"_a, "patience_s"_a, "numbers"_a, "column"_a,
           "row_bytes"_a, "is_alltoall"_a, "job_rank"_a, "packets"_a, "room"_a, "room_then"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 14>())
      .def_property_readonly("is_valid", &EarlyGather::is_valid);

  py::class_<EarlyReduceScatter, EarlyAllreduce>(m, "EarlyReduceScatter")
      .def(py::init([](ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, const EarlyShape& shape, int spin_us,
                       double patience_s, std::uint32_t part) {
             const std::chrono::microseconds spin(spin_us);
             return std::make_unique<EarlyReduceScatter>(counts, turns, look, shape, spin, patience_s, part);
           }),
           "counts"_a, "turns"_a, "look"_a, "shape"_a, "spin_us"_a, "patience_s"_a, "part"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>());
}

}  // namespace

void register_messages(py::module_& m) {
  register_bound_messages(m);
  register_bound_pipeline(m);
  register_early_allreduce(m);
}

}  // namespace hvdlite
