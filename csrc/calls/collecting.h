// Operations of a burst, as they are submitted: an address each, in a list.
#pragma once

#include <pybind11/pybind11.h>

#include <limits>
#include <memory>
#include <vector>

#include "calls/shortcut.h"
#include "calls/signature.h"
#include "calls/started_burst.h"

namespace hvdlite {

// What does not come as it came before is taken by `hvdlite.coordinator.collector`, of which this is a part. With the
// GIL, under which nobody else does anything between two looks at what Python sees; who is in the middle of something
// holds `lock`.
//
// A burst that the shortcut can start is one of native code until it is complete, or Python has to `adopt` it.
class Collecting {
 public:
  // `next_look`: by then the coordinator thread looks at what takes longer than `longest_s`.
  // `open(known)` begins a burst of that which is known, if it comes next, as `begin` hears; `complete()`: all of what
  // is open may be there; `take_apart()`: somebody waits for it.
  Collecting(pybind11::object lock, std::shared_ptr<Shortcut> shortcut, std::shared_ptr<Instant> next_look,
             double longest_s, pybind11::object open, pybind11::object complete, pybind11::object take_apart);

  // Bursts that may come.
  struct Known {
    pybind11::object known;
    std::shared_ptr<const Signatures> signatures;
  };
  void follow(std::vector<Known> known);

  // From now on operations are parts of `burst`: (input, output, sequence, owner of both), in `parts`.
  void begin(pybind11::object burst, pybind11::list parts, std::shared_ptr<const Signatures> signatures);
  // No more of them.
  void stop();
  // It is somebody else's.
  void end();
  // Python's burst, as `begin` has heard of it; null where there is none.
  const pybind11::object& burst() const { return burst_; }
  // What is open here becomes the burst that `make` makes of it; nothing happens where there is none.
  void adopt(const pybind11::object& make);
  bool is_open() const { return gathered_ != nullptr || burst_; }

  // When the last burst was begun, here or there.
  Instant since{-std::numeric_limits<double>::infinity()};

  // What makes handles, as `make_handle(burst, place, result, name)`, results that are not in place, and sequences:
  // `named` of what has a name.
  struct Maker {
    pybind11::object make_handle;
    pybind11::object new_like;
    std::int64_t named;
    std::shared_ptr<Count> unnamed;
  };
  // The handle of an operation that was taken, in place or not; null where nothing was done.
  pybind11::object take(const Arguments& arguments, bool in_place, const Maker& maker);

 private:
  std::shared_ptr<const Signature> expected() const;
  bool is_full() const;
  bool is_locked() const;
  bool gathers_for(const Arguments& arguments);
  bool opens_for(const Arguments& arguments);

  pybind11::object lock_;
  std::shared_ptr<Shortcut> shortcut_;
  std::shared_ptr<Instant> next_look_;
  double longest_s_;
  pybind11::object open_;
  pybind11::object complete_;
  pybind11::object take_apart_;
  std::vector<Known> known_;
  std::shared_ptr<StartedBurst> gathered_;
  pybind11::object burst_;  // of Python's; null where there is none
  pybind11::list parts_;
  std::shared_ptr<const Signatures> signatures_;  // null where nothing is taken
};

}  // namespace hvdlite
