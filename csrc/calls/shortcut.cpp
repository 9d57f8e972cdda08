#include "calls/shortcut.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "calls/tensor_attributes.h"

namespace py = pybind11;

namespace hvdlite {

namespace {

constexpr std::size_t kMostEarlier = 16;
// Periods that were begun without a wait, of which Python hears before there are more.
constexpr std::uint64_t kManyTogether = 64;

bool is_true(const py::object& object, PyObject* name) { return attribute(object.ptr(), name).ptr() == Py_True; }

// Of what a tensor and a result refer to now, as `tensor.set_()` may bring other memory.
py::object owner_of(PyObject* tensor, const py::object& result) {
  return py::make_tuple(call(tensor, names().untyped_storage), result);
}

}  // namespace

// Whoever has begun to be at work with it lets others be at work again.
class Shortcut::AtWork {
 public:
  explicit AtWork(Shortcut& shortcut) : shortcut_(shortcut) {}
  ~AtWork() { end(); }
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;

  bool begin() {
    if (shortcut_.is_own_thread_at_work()) return false;
    has_begun_ = checked(PyObject_CallOneArg(shortcut_.acquire_.ptr(), Py_False)).ptr() == Py_True;
    return has_begun_;
  }

  void end() {
    if (!has_begun_) return;
    has_begun_ = false;
    py::error_scope keep;  // what is being raised
    shortcut_.repeated_.reset();
    PyObject* done = PyObject_CallNoArgs(shortcut_.release_.ptr());
    if (done == nullptr) PyErr_WriteUnraisable(shortcut_.release_.ptr());
    Py_XDECREF(done);
  }

 private:
  Shortcut& shortcut_;
  bool has_begun_ = false;
};

Shortcut::Shortcut(py::object at_work, py::object recorder, Rest rest, py::object settle,
                   std::shared_ptr<Flag> has_waited)
    : is_owned_(at_work.attr("_is_owned")),
      acquire_(at_work.attr("acquire")),
      release_(at_work.attr("release")),
      recorder_(std::move(recorder)),
      rest_(std::move(rest)),
      settle_(std::move(settle)),
      has_waited_(std::move(has_waited)) {}

bool Shortcut::is_own_thread_at_work() const { return checked(PyObject_CallNoArgs(is_owned_.ptr())).ptr() == Py_True; }

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
  periods_ = {};
  return is_known;
}

void Shortcut::learn(std::size_t position, Known known) { entries_.at(position) = {std::move(known), nullptr, 0}; }

void Shortcut::learn_burst(std::size_t position, std::shared_ptr<PlannedBurst> burst) {
  entries_.at(position) = {{}, std::move(burst), 0};
}

bool Shortcut::knows(std::size_t position, const py::object& prepared) const {
  return entries_.at(position).prepared.is(prepared);
}

bool Shortcut::knows_burst(std::size_t position, const py::object& known) const {
  const auto& burst = entries_.at(position).burst;
  return burst != nullptr && burst->known.is(known);
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
  periods_ = {};
}

std::vector<std::pair<py::object, std::uint64_t>> Shortcut::take() {
  std::vector<std::pair<py::object, std::uint64_t>> told;
  untold_ = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[(done_ + i) % entries_.size()];
    if (entry.times == 0) continue;
    told.emplace_back(entry.burst == nullptr ? entry.prepared : py::cast(entry.burst), entry.times);
    entry.times = 0;
  }
  return told;
}

py::object Shortcut::under_way() const {
  if (const auto started = unsettled()) return started->under_way();
  return py::cast(repeated_);
}

bool Shortcut::is_recording() const {
  static PyObject* const enabled = interned("enabled");
  return is_true(recorder_, enabled);
}

Shortcut::Entry* Shortcut::next() {
  if (!is_open_ || started_ != nullptr || entries_.empty()) return nullptr;
  Entry& entry = entries_[done_ % entries_.size()];
  return entry.signature == nullptr ? nullptr : &entry;
}

// What comes next, if that is what a caller asks for: begun, so that others have to hear of it.
bool Shortcut::begin(const Arguments& arguments, py::handle new_like, bool starts, AtWork& at_work, Next& next) {
  auto& [prepared, split_phase, sequence, input, output, owner] = next.operation;
  const Entry* expected = this->next();
  if (expected == nullptr) return false;
  const auto signature = expected->signature;
  if (!signature->matches(arguments, input)) return false;
  next.result = py::reinterpret_borrow<py::object>(arguments.tensor);
  output = input;
  std::uint64_t rows = 0;
  if (new_like) {
    if (is_true(next.result, names().requires_grad)) return false;
    expected = this->next();  // as what was asked may have run code of Python
    if (expected == nullptr || expected->signature != signature) return false;
    rows = expected->call->result_rows();
    const py::object new_result = expected->new_result;
    next.result = new_result.is_none() ? new_like(next.result) : new_result(next.result, rows);
    output = address_of(next.result);
  }
  if (starts) owner = owner_of(arguments.tensor, next.result);
  if (is_recording()) return false;

  // From here on no Python runs until the operation does.
  Entry* entry = this->next();
  if (entry == nullptr || entry->signature != signature) return false;
  const auto turn = static_cast<std::int64_t>(done_ / entries_.size());
  sequence = entry->sequence + turn * entry->stride;
  if (entry->unnamed != nullptr && entry->unnamed->next != sequence) return false;
  split_phase = entry->call->split_phase();
  if (starts && split_phase == nullptr) return false;
  if (!at_work.begin()) return false;
  if (!entry->call->can_run() || (new_like && entry->call->result_rows() != rows)) return false;
  if (entry->unnamed != nullptr) ++entry->unnamed->next;
  next.call = entry->call;
  prepared = entry->prepared;
  input_[0] = entry->gives ? input : 0;
  output_[0] = output;
  return true;
}

// What is begun now may be the first of a period.
void Shortcut::count_period(bool was_waited_before) {
  if (done_ % entries_.size() == 0) ++(was_waited_before ? periods_.waited : periods_.together);
}

void Shortcut::count_submission(bool is_waited_for) {
  count_period(has_waited_->is_set);
  has_waited_->is_set = is_waited_for;
}

// Nobody else was at work, so there was no other plan; but it may have been told to forget this one.
bool Shortcut::count_done(DirectCall::Result ended) {
  if (ended != DirectCall::Result::kDone || entries_.empty()) return false;
  Entry& entry = entries_[done_ % entries_.size()];
  ++entry.times;
  done_ += entry.size();
  untold_ += entry.size();
  return true;
}

// By who is at work, right before `rest_`.
void Shortcut::prepare_to_hand_over(std::optional<py::error_already_set>& interrupt) {
  close();
  // Handlers of signals run here, and not at the first instruction of `rest_`: what was begun has to be taken over.
  if (PyErr_CheckSignals() != 0) interrupt.emplace();
}

py::object Shortcut::repeat(const Arguments& arguments, py::handle new_like) {
  if (started_ != nullptr && !is_rid_of_started(!is_started(arguments))) return {};
  AtWork at_work(*this);
  Next next;
  if (!begin(arguments, new_like, false, at_work, next)) return {};
  count_submission(true);
  Operation& operation = next.operation;
  repeated_.emplace(operation.prepared, operation.sequence);
  DirectCall::Result ended;
  {
    const py::gil_scoped_release without_gil;
    ended = next.call->run(input_, output_, plan_, done_ + 1, heard_);
  }
  if (count_done(ended)) return next.result;
  operation.owner = owner_of(arguments.tensor, next.result);
  std::optional<py::error_already_set> interrupt;
  prepare_to_hand_over(interrupt);
  const py::object left = rest_.of(operation, ended);
  at_work.end();
  if (interrupt) throw *interrupt;
  if (!left.is_none()) left.attr("wait")();
  return next.result;
}

py::object Shortcut::start(const Arguments& arguments, py::handle new_like, py::handle make_handle) {
  if (periods_.together >= kManyTogether) return {};
  if (started_ != nullptr && !is_rid_of_started(false)) return {};
  AtWork at_work(*this);
  Next next;
  if (!begin(arguments, new_like, true, at_work, next)) return {};
  count_submission(false);
  const auto made = std::make_shared<StartedOperation>(next.operation, shared_from_this());
  made->call()->start(input_, output_, plan_, done_ + 1);
  started_ = made;
  const py::object started = py::cast(started_);
  at_work.end();
  PyObject* const made_of[] = {started.ptr(), next.result.ptr(), arguments.name};
  return checked(PyObject_Vectorcall(make_handle.ptr(), made_of, std::size(made_of), nullptr));
}

std::shared_ptr<PlannedBurst> Shortcut::next_burst() {
  if (!is_open_ || periods_.together >= kManyTogether) return {};
  if (started_ != nullptr && !is_rid_of_started(false)) return {};
  if (!is_open_ || entries_.empty() || is_recording()) return {};
  return entries_[done_ % entries_.size()].burst;
}

bool Shortcut::expects(const std::shared_ptr<PlannedBurst>& burst) const {
  return is_open_ && started_ == nullptr && !entries_.empty() && entries_[done_ % entries_.size()].burst == burst;
}

bool Shortcut::start(const std::shared_ptr<StartedBurst>& burst) {
  if (is_recording() || !expects(burst->planned())) return false;
  const auto turn = static_cast<std::int64_t>(done_ / entries_.size());
  if (!burst->is_in_turn(turn)) return false;
  AtWork at_work(*this);
  if (!at_work.begin() || !burst->planned()->call->can_run()) return false;
  burst->start(plan_, done_ + burst->planned()->size());
  count_period(burst->was_waited_before());
  started_ = burst;
  return true;
}

// Whether what was started has the name that a caller gives to another one, which is a mistake while it is under way.
bool Shortcut::is_started(const Arguments& arguments) const {
  if (entries_.empty()) return false;
  const Entry& entry = entries_[done_ % entries_.size()];
  const auto has_the_name = [&](const auto& signature) {
    return signature != nullptr && signature->has_the_name_of(arguments);
  };
  if (entry.burst == nullptr) return has_the_name(entry.signature);
  const auto& signatures = entry.burst->signatures->by_place;
  return std::any_of(signatures.begin(), signatures.end(), has_the_name);
}

// Whether what was started is complete; if not `waits`, after a moment.
bool Shortcut::is_rid_of_started(bool waits) {
  const auto started = started_;
  if (!waits && !started->call()->is_ready(SplitPhaseCall::kMoment)) return false;
  complete(started);
  return started->is_complete();
}

void Shortcut::complete(const std::shared_ptr<Started>& started) {
  AtWork at_work(*this);
  if (started_ != started || !at_work.begin()) return;
  SplitPhaseCall* const call = started->call();
  const auto kept = started->kept();
  DirectCall::Result ended;
  {
    const py::gil_scoped_release without_gil;
    ended = call->complete(heard_);
  }
  if (started_ != started) return;  // all was forgotten meanwhile
  take_started();
  if (count_done(ended)) {
    at_work.end();
    started->settle(py::none());
    return;
  }
  std::optional<py::error_already_set> interrupt;
  try {
    prepare_to_hand_over(interrupt);
    started->settle(started->go_on(rest_, ended));
  } catch (const py::error_already_set& error) {
    started->fail(error.value());
    throw;
  }
  at_work.end();
  if (interrupt) throw *interrupt;
}

}  // namespace hvdlite
