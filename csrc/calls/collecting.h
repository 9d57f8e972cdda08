// Operations of a burst, as they are submitted: an address each, in a list of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "calls/signature.h"

namespace hvdlite {

// What does not come as it came before is taken by `hvdlite.coordinator.collector`, of which this is a part. With the
// GIL, under which nobody else does anything between two looks at what Python sees; who is in the middle of something
// holds `lock`.
class Collecting {
 public:
  // `open(known)` begins a burst of that which is known, if it comes next, as `begin` hears; `complete(burst)`: all of
  // it is there.
  Collecting(pybind11::object lock, pybind11::object open, pybind11::object complete);

  // Bursts that may come.
  struct Known {
    pybind11::object known;
    std::shared_ptr<const Signatures> signatures;
  };
  void follow(std::vector<Known> known);

  // From now on operations are parts of `burst`: (input, output, sequence, owner of both), in `parts`.
  void begin(pybind11::object burst, pybind11::list parts, std::shared_ptr<const Signatures> signatures);
  void end();

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
  const Signature* expected() const;
  bool open_for(const Arguments& arguments);

  pybind11::object lock_;
  pybind11::object open_;
  pybind11::object complete_;
  std::vector<Known> known_;
  pybind11::object burst_;
  pybind11::list parts_;
  std::shared_ptr<const Signatures> signatures_;
};

}  // namespace hvdlite
