#include "calls/collecting.h"

#include <chrono>
#include <iterator>
#include <utility>

#include "calls/tensor_attributes.h"

namespace py = pybind11;

namespace hvdlite {

Collecting::Collecting(py::object lock, std::shared_ptr<Shortcut> shortcut, std::shared_ptr<Instant> next_look,
                       double longest_s, py::object open, py::object complete, py::object take_apart)
    : lock_(std::move(lock)),
      shortcut_(std::move(shortcut)),
      next_look_(std::move(next_look)),
      longest_s_(longest_s),
      open_(std::move(open)),
      complete_(std::move(complete)),
      take_apart_(std::move(take_apart)) {}

void Collecting::follow(std::vector<Known> known) {
  known_.swap(known);  // what it refers to may run code of Python when it goes
}

void Collecting::begin(py::object burst, py::list parts, std::shared_ptr<const Signatures> signatures) {
  burst_ = std::move(burst);
  parts_ = std::move(parts);
  signatures_ = std::move(signatures);
}

void Collecting::stop() { signatures_ = nullptr; }

void Collecting::end() {
  stop();
  const auto dropped = std::move(burst_);
}

void Collecting::adopt(const py::object& make) {
  const auto gathered = gathered_;
  if (gathered == nullptr) return;
  py::object burst = make(gathered);
  begin(burst, gathered->parts(), gathered->planned()->signatures);  // and no Python runs until it is settled
  gathered_ = nullptr;
  gathered->settle(std::move(burst));
}

// Of what comes next.
std::shared_ptr<const Signature> Collecting::expected() const {
  if (signatures_ == nullptr || is_full()) return nullptr;
  return signatures_->by_place[parts_.size()];
}

bool Collecting::is_full() const { return parts_.size() >= signatures_->by_place.size(); }

bool Collecting::is_locked() const {
  static PyObject* const locked = interned("locked");
  return call(lock_.ptr(), locked).ptr() != Py_False;
}

// Whether a burst is open here now, as the one that comes next begins so.
bool Collecting::gathers_for(const Arguments& arguments) {
  const auto planned = shortcut_->next_burst();
  if (planned == nullptr) return false;
  const auto first = planned->signatures->by_place.front();
  std::uintptr_t address = 0;
  if (first == nullptr || !first->matches(arguments, address)) return false;
  // From here on no Python runs.
  const std::int64_t now_ns = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const double now_s = static_cast<double>(now_ns) * 1e-9;
  if (is_open() || now_s + longest_s_ < next_look_->at_s || !shortcut_->expects(planned) || is_locked()) return false;
  gathered_ = std::make_shared<StartedBurst>(planned, shortcut_, take_apart_, now_ns);
  parts_ = gathered_->parts();
  signatures_ = planned->signatures;
  since.at_s = now_s;
  return true;
}

// Whether a burst is open now, as one may come that begins so.
bool Collecting::opens_for(const Arguments& arguments) {
  if (known_.empty() || is_open()) return false;
  if (gathers_for(arguments)) return true;
  for (std::size_t i = 0; i < known_.size(); ++i) {
    const Known known = known_[i];                          // others may be followed while we look
    const auto first = known.signatures->by_place.front();  // another may be learned while we look
    std::uintptr_t address = 0;
    if (first != nullptr && first->matches(arguments, address)) return open_(known.known).ptr() == Py_True;
  }
  return false;
}

py::object Collecting::take(const Arguments& arguments, bool in_place, const Maker& maker) {
  if (signatures_ == nullptr && !opens_for(arguments)) return {};
  const auto signature = expected();
  if (signature == nullptr) return {};
  const auto signatures = signatures_;  // it may end while we look
  const auto gathered = gathered_;
  std::uintptr_t source = 0;
  if (!signature->matches(arguments, source)) return {};
  const py::handle tensor(arguments.tensor);
  auto result = py::reinterpret_borrow<py::object>(tensor);
  std::uintptr_t target = source;
  if (!in_place) {
    result = maker.new_like(tensor);
    target = address_of(result);
  }
  // As it is now, should `tensor.set_()` bring another.
  py::object owner = call(arguments.tensor, names().untyped_storage);
  if (!in_place) owner = py::make_tuple(owner, result);

  const py::object burst = gathered == nullptr ? burst_ : py::cast(gathered);

  // From here on no Python runs until it is taken.
  const bool is_its = gathered_ == gathered && (gathered != nullptr || burst_.is(burst));
  if (!is_its || expected() != signature || is_locked()) return {};
  const py::int_ place(parts_.size());
  const std::int64_t sequence = signature->is_named() ? maker.named : maker.unnamed->next++;
  if (gathered == nullptr) {
    parts_.append(py::make_tuple(source, target, sequence, owner));
  } else {
    gathered->add(source, target, sequence, owner);
  }
  PyObject* const made_of[] = {burst.ptr(), place.ptr(), result.ptr(), arguments.name};
  py::object handle = checked(PyObject_Vectorcall(maker.make_handle.ptr(), made_of, std::size(made_of), nullptr));
  if (signatures_ != signatures || !is_full()) return handle;
  if (gathered != nullptr && gathered_ == gathered && !is_locked() && shortcut_->start(gathered)) {
    gathered_ = nullptr;
    stop();
    parts_ = py::list();  // whose memory is the burst's
  } else {
    complete_();
  }
  return handle;
}

}  // namespace hvdlite
