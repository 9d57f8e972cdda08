#include "bindings/shortcut_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "calls/collecting.h"
#include "calls/shortcut.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {

namespace {

// A function of Python's own kind that refers to a T. pybind11's take 0.3 us to call, these a tenth.
template <class T>
py::object function_of(PyMethodDef& definition, T closure) {
  const py::capsule self(new T(std::move(closure)), [](void* owned) { delete static_cast<T*>(owned); });
  PyObject* made = PyCFunction_New(&definition, self.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// (tensor, name, op, prescale, postscale, in_place)
constexpr Py_ssize_t kArguments = 6;

// `attempt` of a T, which says of which `kind` it is, and of such arguments; its result is None where it is null.
template <class T, class Attempt>
PyObject* attempted(PyObject* self, PyObject* const* given, Py_ssize_t count, Attempt attempt) {
  if (count != kArguments) {
    PyErr_SetString(PyExc_TypeError, "expected (tensor, name, op, prescale, postscale, in_place)");
    return nullptr;
  }
  try {
    T& closure = *static_cast<T*>(PyCapsule_GetPointer(self, nullptr));
    py::object result = attempt(
        closure, Arguments{closure.kind.ptr(), given[0], given[1], given[2], given[3], given[4]}, given[5] == Py_True);
    return result ? result.release().ptr() : py::none().release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

struct Repeater {
  py::object kind;
  std::shared_ptr<Shortcut> shortcut;
  py::object new_like;
};

struct Submitter {
  py::object kind;
  std::shared_ptr<Shortcut> shortcut;
  py::object make_handle;  // of what is started
  std::shared_ptr<Collecting> collecting;
  Collecting::Maker maker;  // of what is collected
};

PyObject* repeat(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return attempted<Repeater>(self, given, count, [](Repeater& closure, const Arguments& arguments, bool in_place) {
    return closure.shortcut->repeat(arguments, in_place ? py::handle() : closure.new_like);
  });
}

PyObject* submit(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return attempted<Submitter>(self, given, count, [](Submitter& closure, const Arguments& arguments, bool in_place) {
    const py::object taken = closure.collecting->take(arguments, in_place, closure.maker);
    if (taken) return taken;
    const py::handle new_like = in_place ? py::handle() : closure.maker.new_like;
    return closure.shortcut->start(arguments, new_like, closure.make_handle);
  });
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef definition(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef repeat_definition = definition<repeat>("repeat");
PyMethodDef submit_definition = definition<submit>("submit");

}  // namespace

void register_shortcut(py::module_& m) {
  py::class_<Flag, std::shared_ptr<Flag>>(m, "Flag")
      .def(py::init<bool>(), "is_set"_a)
      .def_readwrite("is_set", &Flag::is_set);
  py::class_<Count, std::shared_ptr<Count>>(m, "Count")
      .def(py::init<>())
      .def_readonly("next", &Count::next)
      .def("take", [](Count& self) { return self.next++; })
      .def("restart", [](Count& self) { self.next = 0; });

  py::class_<Signature, std::shared_ptr<Signature>>(m, "Signature")
      .def(py::init([](const py::object& kind, const py::object& tensor, const py::object& name, const py::object& op,
                       const py::object& prescale, const py::object& postscale, bool is_empty, py::object home) {
             const Arguments arguments{kind.ptr(), tensor.ptr(), name.ptr(), op.ptr(), prescale.ptr(), postscale.ptr()};
             return std::make_shared<Signature>(arguments, is_empty, std::move(home));
           }),
           "kind"_a, "tensor"_a, "name"_a, "op"_a, "prescale"_a, "postscale"_a, "is_empty"_a, "home"_a);

  py::class_<Signatures, std::shared_ptr<Signatures>>(m, "Signatures")
      .def(py::init([](std::size_t count) {
             auto made = std::make_shared<Signatures>();
             made->by_place.resize(count);
             return made;
           }),
           "count"_a)
      .def(
          "knows", [](const Signatures& self, std::size_t place) { return self.by_place.at(place) != nullptr; },
          "place"_a)
      .def_property_readonly("are_known", &Signatures::are_known)
      .def(
          "learn",
          [](Signatures& self, std::size_t place, std::shared_ptr<Signature> signature) {
            self.by_place.at(place) = std::move(signature);
          },
          "place"_a, "signature"_a);

  py::class_<Instant, std::shared_ptr<Instant>>(m, "Instant")
      .def(py::init<double>(), "at_s"_a)
      .def_readwrite("at_s", &Instant::at_s);

  py::class_<Started, std::shared_ptr<Started>>(m, "Started")
      .def("complete_now",
           [](const Started& self) {
             SplitPhaseCall* const call = self.call();
             const auto kept = self.kept();
             const py::gil_scoped_release without_gil;
             return static_cast<int>(call->complete_now());
           })
      .def("settle", &Started::settle, "left"_a)
      .def("fail", &Started::fail, "error"_a);
  py::class_<StartedOperation, Started, std::shared_ptr<StartedOperation>>(m, "StartedOperation")
      .def_property_readonly("operation",
                             [](const StartedOperation& self) {
                               const auto& operation = self.operation();
                               return py::make_tuple(operation.prepared, operation.sequence, operation.input,
                                                     operation.output, operation.owner);
                             })
      .def("wait", &StartedOperation::wait)
      .def("poll", &StartedOperation::poll);
  py::class_<PlannedBurst, std::shared_ptr<PlannedBurst>>(m, "PlannedBurst")
      .def(py::init([](py::object known, py::object prepared, DirectCall& call, std::shared_ptr<Signatures> signatures,
                       const std::vector<std::pair<std::int64_t, std::int64_t>>& given) {
             std::vector<PlannedBurst::Number> numbers;
             for (const auto& [first, stride] : given) numbers.push_back({first, stride});
             return std::make_shared<PlannedBurst>(
                 PlannedBurst{std::move(known), std::move(prepared), &call, std::move(signatures), std::move(numbers)});
           }),
           "known"_a, "prepared"_a, "call"_a, "signatures"_a, "numbers"_a)
      .def_readonly("known", &PlannedBurst::known)
      .def_readonly("prepared", &PlannedBurst::prepared);
  py::class_<StartedBurst, Started, std::shared_ptr<StartedBurst>>(m, "StartedBurst")
      .def_property_readonly("planned", &StartedBurst::planned)
      .def_property_readonly("parts", &StartedBurst::parts)
      .def_property_readonly("since_ns", &StartedBurst::since_ns)
      .def_property_readonly("was_waited_before", &StartedBurst::was_waited_before)
      .def_property_readonly("has_succeeded", &StartedBurst::is_complete)
      .def("ask", &StartedBurst::ask)
      .def("wait", &StartedBurst::wait, "number"_a)
      .def("poll", &StartedBurst::poll, "number"_a);

  py::class_<Shortcut, std::shared_ptr<Shortcut>>(m, "Shortcut")
      .def(py::init([](py::object at_work, py::object recorder, py::object rest, py::object rest_of_burst,
                       py::object settle, std::shared_ptr<Flag> has_waited) {
             return std::make_shared<Shortcut>(std::move(at_work), std::move(recorder),
                                               Rest{std::move(rest), std::move(rest_of_burst)}, std::move(settle),
                                               std::move(has_waited));
           }),
           "at_work"_a, "recorder"_a, "rest"_a, "rest_of_burst"_a, "settle"_a, "has_waited"_a)
      .def("follow", &Shortcut::follow, "plan"_a, "period"_a, "serial"_a)
      .def("knows", &Shortcut::knows, "position"_a, "prepared"_a)
      .def(
          "learn",
          [](Shortcut& self, std::size_t position, std::shared_ptr<Signature> signature, py::object prepared,
             DirectCall& call, py::object new_result, bool gives, std::shared_ptr<Count> unnamed, std::int64_t sequence,
             std::int64_t stride) {
            self.learn(position, {std::move(signature), std::move(prepared), &call, std::move(new_result), gives,
                                  std::move(unnamed), sequence, stride});
          },
          "position"_a, "signature"_a, "prepared"_a, "call"_a, "new_result"_a, "gives"_a, "unnamed"_a, "sequence"_a,
          "stride"_a)
      .def("knows_burst", &Shortcut::knows_burst, "position"_a, "known"_a)
      .def("learn_burst", &Shortcut::learn_burst, "position"_a, "burst"_a)
      .def("open", &Shortcut::open, "done"_a, "heard"_a, "closings"_a)
      .def("close", &Shortcut::close)
      .def("pause", &Shortcut::pause)
      .def_property_readonly("closings", &Shortcut::closings)
      .def("forget", &Shortcut::forget)
      .def("take", &Shortcut::take)
      .def_property_readonly("untold", &Shortcut::untold)
      .def("take_periods",
           [](Shortcut& shortcut) {
             const auto [together, waited] = shortcut.take_periods();
             return py::make_tuple(together, waited);
           })
      .def_property_readonly("unsettled", &Shortcut::unsettled)
      .def_property_readonly("under_way", &Shortcut::under_way)
      .def("take_started", &Shortcut::take_started)
      .def(
          "function",
          [](std::shared_ptr<Shortcut> self, py::object kind, py::object new_like) {
            return function_of(repeat_definition, Repeater{std::move(kind), std::move(self), std::move(new_like)});
          },
          "kind"_a, "new_like"_a)
      .def(
          "submitting_function",
          [](std::shared_ptr<Shortcut> self, py::object kind, py::object make_handle,
             std::shared_ptr<Collecting> collecting, py::object make_handle_in_burst, py::object new_like,
             std::int64_t named, std::shared_ptr<Count> unnamed) {
            Collecting::Maker maker{std::move(make_handle_in_burst), std::move(new_like), named, std::move(unnamed)};
            return function_of(submit_definition, Submitter{std::move(kind), std::move(self), std::move(make_handle),
                                                            std::move(collecting), std::move(maker)});
          },
          "kind"_a, "make_handle"_a, "collecting"_a, "make_handle_in_burst"_a, "new_like"_a, "named"_a, "unnamed"_a);

  py::class_<Collecting, std::shared_ptr<Collecting>>(m, "Collecting")
      .def(py::init<py::object, std::shared_ptr<Shortcut>, std::shared_ptr<Instant>, double, py::object, py::object,
                    py::object>(),
           "lock"_a, "shortcut"_a, "next_look"_a, "longest_s"_a, "open"_a, "complete"_a, "take_apart"_a)
      .def(
          "follow",
          [](Collecting& self, const std::vector<std::pair<py::object, std::shared_ptr<Signatures>>>& given) {
            std::vector<Collecting::Known> known;
            for (const auto& [burst, signatures] : given) known.push_back({burst, signatures});
            self.follow(std::move(known));
          },
          "known"_a)
      .def("begin", &Collecting::begin, "burst"_a, "parts"_a, "signatures"_a)
      .def("stop", &Collecting::stop)
      .def("end", &Collecting::end)
      .def_property_readonly(
          "burst", [](const Collecting& self) { return self.burst() ? self.burst() : py::object(py::none()); })
      .def("adopt", &Collecting::adopt, "make"_a)
      .def_property_readonly("is_open", &Collecting::is_open)
      .def_property(
          "since_s", [](const Collecting& self) { return self.since.at_s; },
          [](Collecting& self, double now_s) { self.since.at_s = now_s; });
}

}  // namespace hvdlite
