#include "shortcut.h"

#include <optional>
#include <utility>

#include "tensor_attributes.h"

namespace py = pybind11;

namespace hvdlite {

namespace {

constexpr std::size_t kMostEarlier = 16;

bool is_true(const py::object& object, PyObject* name) { return attribute(object.ptr(), name).ptr() == Py_True; }

// Lets others be at work again.
class AtWork {
 public:
  explicit AtWork(const py::object& release) : release_(release) {}
  ~AtWork() { end(); }
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;

  void end() {
    if (has_ended_) return;
    has_ended_ = true;
    py::error_scope keep;  // what is being raised
    PyObject* done = PyObject_CallNoArgs(release_.ptr());
    if (done == nullptr) PyErr_WriteUnraisable(release_.ptr());
    Py_XDECREF(done);
  }

 private:
  const py::object& release_;
  bool has_ended_ = false;
};

}  // namespace

Shortcut::Shortcut(py::object at_work, py::object recorder, py::object rest)
    : is_owned_(at_work.attr("_is_owned")),
      acquire_(at_work.attr("acquire")),
      release_(at_work.attr("release")),
      recorder_(std::move(recorder)),
      rest_(std::move(rest)) {}

bool Shortcut::follow(std::uint64_t plan, std::size_t period, std::uint64_t serial) {
  close();
  std::map<std::uint64_t, std::vector<Entry>> dropped;  // what they refer to may run code of Python when it goes
  if (earlier_.size() == kMostEarlier) dropped.swap(earlier_);
  earlier_[serial_].swap(entries_);
  const auto found = earlier_.find(serial);
  const bool is_known = found != earlier_.end() && found->second.size() == period;
  if (is_known) entries_.swap(found->second);
  entries_.resize(period);
  serial_ = serial;
  plan_ = plan;
  untold_ = 0;
  return is_known;
}

void Shortcut::learn(std::size_t position, Operation operation) { entries_.at(position) = {std::move(operation), 0}; }

bool Shortcut::knows(std::size_t position, const py::object& prepared) const {
  return entries_.at(position).prepared.is(prepared);
}

void Shortcut::open(std::uint64_t done, std::uint32_t heard, std::uint64_t closings) {
  if (closings != closings_) return;
  done_ = done;
  heard_ = heard;
  is_open_ = true;
}

void Shortcut::close() {
  is_open_ = false;
  ++closings_;
}

void Shortcut::forget() {
  close();
  const auto dropped = std::move(entries_);  // what they refer to may run code of Python when it goes
  const auto also_dropped = std::move(earlier_);
  entries_.clear();
  earlier_.clear();
  untold_ = 0;
}

std::vector<std::pair<py::object, std::uint64_t>> Shortcut::take() {
  std::vector<std::pair<py::object, std::uint64_t>> told;
  untold_ = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[(done_ + i) % entries_.size()];
    if (entry.times == 0) continue;
    told.emplace_back(entry.prepared, entry.times);
    entry.times = 0;
  }
  return told;
}

Shortcut::Entry* Shortcut::next() {
  if (!is_open_ || entries_.empty()) return nullptr;
  Entry& entry = entries_[done_ % entries_.size()];
  return entry.signature == nullptr ? nullptr : &entry;
}

bool Shortcut::begin_work() const {
  const auto asked = [](PyObject* answer) {
    const auto owned = py::reinterpret_steal<py::object>(answer);
    if (!owned) throw py::error_already_set();
    return owned.ptr() == Py_True;
  };
  if (asked(PyObject_CallNoArgs(is_owned_.ptr()))) return false;  // a signal handler has interrupted who is at work
  return asked(PyObject_CallOneArg(acquire_.ptr(), Py_False));
}

py::object Shortcut::repeat(const Arguments& arguments, py::handle new_like) {
  const Entry* expected = next();
  if (expected == nullptr) return {};
  const auto signature = expected->signature;
  std::uintptr_t address = 0;
  if (!signature->matches(arguments, address)) return {};
  auto result = py::reinterpret_borrow<py::object>(arguments.tensor);
  std::uintptr_t target = address;
  std::uint64_t rows = 0;
  if (new_like) {
    if (is_true(result, names().requires_grad)) return {};
    expected = next();  // as what was asked may have run code of Python
    if (expected == nullptr || expected->signature != signature) return {};
    rows = expected->call->result_rows();
    const py::object new_result = expected->new_result;
    result = new_result.is_none() ? new_like(result) : new_result(result, rows);
    target = address_of(result);
  }
  static PyObject* const enabled = interned("enabled");
  if (is_true(recorder_, enabled)) return {};

  // From here on no Python runs until the operation does.
  Entry* entry = next();
  if (entry == nullptr || entry->signature != signature) return {};
  const auto turn = static_cast<std::int64_t>(done_ / entries_.size());
  const std::int64_t sequence = entry->sequence + turn * entry->stride;
  if (entry->unnamed != nullptr && entry->unnamed->next != sequence) return {};
  if (!begin_work()) return {};
  AtWork at_work(release_);
  if (!entry->call->can_run() || (new_like && entry->call->result_rows() != rows)) return {};
  if (entry->unnamed != nullptr) ++entry->unnamed->next;
  DirectCall* const call = entry->call;
  const py::object prepared = entry->prepared;
  input_[0] = entry->gives ? address : 0;
  output_[0] = target;
  DirectCall::Result ended;
  {
    const py::gil_scoped_release without_gil;
    ended = call->run(input_, output_, plan_, done_ + 1, heard_);
  }
  // Nobody else was at work, so there was no other plan; but it may have been told to forget this one.
  if (ended == DirectCall::Result::kDone && !entries_.empty()) {
    ++entries_[done_ % entries_.size()].times;
    ++done_;
    ++untold_;
    return result;
  }
  close();
  // Handlers of signals run here, and not at the first instruction of `rest`: what was begun has to be taken over.
  std::optional<py::error_already_set> interrupt;
  if (PyErr_CheckSignals() != 0) interrupt.emplace();
  // The storage, as `tensor.set_()` may bring another once a signal has ended the wait.
  const py::object owner = py::make_tuple(hvdlite::call(arguments.tensor, names().untyped_storage), result);
  const py::object left = rest_(prepared, sequence, address, target, owner, static_cast<int>(ended));
  at_work.end();
  if (interrupt) throw *interrupt;
  if (!left.is_none()) left.attr("wait")();
  return result;
}

}  // namespace hvdlite
