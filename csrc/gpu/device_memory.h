// Memory of a GPU with a copy per rank of a node, all of them mapped by every rank.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda_driver.h"

namespace hvdlite {

// This rank's allocation, and the others' beside it.
//
// Whoever drops it last need not wait for what is still enqueued on it: the memory goes when the device has done all
// that it was given until then. A forked child has nothing of it: what the child drops is the parent's.
class DeviceSegment {
 public:
  virtual ~DeviceSegment();
  DeviceSegment(const DeviceSegment&) = delete;
  DeviceSegment& operator=(const DeviceSegment&) = delete;

  // What another process needs to get this rank's allocation: bytes, and a file descriptor, which the caller closes.
  virtual std::pair<std::string, int> share() = 0;

  // Maps all allocations: what rank i has shared is `shared[i]` and `files[i]`, of which entry `own` is ignored. The
  // caller closes the files. Throws std::runtime_error, also where the device cannot reach another one.
  virtual void map(const std::vector<std::string>& shared, const std::vector<int>& files, std::size_t own) = 0;

  // Whether NCCL takes it as its own.
  virtual bool is_for_nccl() const = 0;

  // Of every rank's copy, once they are mapped.
  const std::vector<std::uintptr_t>& copies() const { return holding_->copies; }
  std::size_t copy_bytes() const { return holding_->nbytes; }

  // `release` is called once the device has done all that it was given, by a thread that may wait; then memory goes.
  void before_unmapping(std::function<void()> release) { holding_->releases.push_back(std::move(release)); }

 protected:
  // What has to be given back, by whom it may outlive.
  struct Holding {
    virtual ~Holding() = default;

    const pid_t owner = getpid();
    cuda::Context context = nullptr;
    std::size_t nbytes = 0;  // of a copy
    std::vector<std::uintptr_t> copies;
    std::vector<std::function<void()>> releases;
    bool is_in_use = false;  // by a device, or by other ranks
  };

  explicit DeviceSegment(std::unique_ptr<Holding> holding) : holding_(std::move(holding)) {}

  template <class Kind>
  Kind& holding() {
    return static_cast<Kind&>(*holding_);
  }

 private:
  std::unique_ptr<Holding> holding_;
};

}  // namespace hvdlite
