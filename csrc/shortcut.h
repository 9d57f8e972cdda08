// The shortest way from a call in Python to an operation that was done before: no Python runs in between.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "direct_call.h"
#include "signature.h"

namespace hvdlite {

// A plan that runs free says which operation comes next, and so with what it will be called. Where it is, it is done
// here; else nothing happens, and the caller goes the long way, by `hvdlite.coordinator`. That `take`s what was done
// here before it does anything of its own.
//
// All is done with the GIL, but the operation itself; so between two looks at what Python sees nobody else does
// anything. Whoever is at work holds `at_work`, as the coordinator does.
class Shortcut {
 public:
  // `at_work`: a threading.RLock. `recorder`: while its `enabled` is true nothing is done here. `rest`: is called, at
  // work, with what was not done at once: (prepared, sequence, input, output, owner, result); returns what is to be
  // waited for afterwards, or None.
  Shortcut(pybind11::object at_work, pybind11::object recorder, pybind11::object rest);

  // A plan begins. Whether what was learned is known still, as another one of this `serial` was followed before.
  bool follow(std::uint64_t plan, std::size_t period, std::uint64_t serial);

  // An operation of a plan. `prepared`: does it, by `call`, which lives as long. `new_result`: makes a result, of the
  // tensor and of as many rows as `call` says; None where it is like the tensor. `gives`: whether the caller's tensor
  // is what this rank contributes; else zeros are. `unnamed`: counts it, null where it has a name. `sequence`: its
  // number in the first period; in each one after that it is `stride` larger.
  struct Operation {
    std::shared_ptr<const Signature> signature;
    pybind11::object prepared;
    DirectCall* call = nullptr;
    pybind11::object new_result;
    bool gives = true;
    std::shared_ptr<Count> unnamed;
    std::int64_t sequence = 0;
    std::int64_t stride = 0;
  };
  void learn(std::size_t position, Operation operation);
  bool knows(std::size_t position, const pybind11::object& prepared) const;

  // This rank has done `done` operations of the plan, and has followed `heard` rings; it was at nothing else when
  // `closings` was read, and if it has been closed since, it may be now.
  void open(std::uint64_t done, std::uint32_t heard, std::uint64_t closings);
  // Something else is begun.
  void close();
  std::uint64_t closings() const { return closings_; }
  void forget();

  // Since the last time: (prepared, how often it was done), the last one last.
  std::vector<std::pair<pybind11::object, std::uint64_t>> take();
  // How many operations `take` has yet to tell of.
  std::uint64_t untold() const { return untold_; }

  // The result of the operation; null where nothing was done. Without `new_like` it takes the place of the input.
  // Raises what the operation ends in.
  pybind11::object repeat(const Arguments& arguments, pybind11::handle new_like);

 private:
  struct Entry : Operation {
    std::uint64_t times = 0;  // that `take` has yet to tell of
  };

  Entry* next();
  bool begin_work() const;

  pybind11::object is_owned_;
  pybind11::object acquire_;
  pybind11::object release_;
  pybind11::object recorder_;
  pybind11::object rest_;
  std::vector<Entry> entries_;
  std::map<std::uint64_t, std::vector<Entry>> earlier_;  // of plans that are not followed now, by their serials
  std::uint64_t serial_ = 0;
  std::uint64_t plan_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t untold_ = 0;
  std::uint64_t closings_ = 0;
  std::uint32_t heard_ = 0;
  bool is_open_ = false;
  std::vector<std::uintptr_t> input_{0};
  std::vector<std::uintptr_t> output_{0};
};

}  // namespace hvdlite
