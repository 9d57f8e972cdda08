// Memory of a GPU with a copy per rank of a node, all of them mapped by every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.h"

namespace hvdlite {

// This rank's allocation, and the others' beside it. The driver keeps an allocation as long as anybody has it mapped.
//
// Whoever drops it last need not wait for what is still enqueued on it: the memory goes when the device has done all
// that it was given until then.
class DeviceSegment {
 public:
  // Whether `device` can make such memory; else why not.
  static bool is_possible(int device);

  // At least `nbytes`, rounded up to what the driver gives. Contents are undefined.
  DeviceSegment(int device, std::size_t nbytes);
  ~DeviceSegment();
  DeviceSegment(const DeviceSegment&) = delete;
  DeviceSegment& operator=(const DeviceSegment&) = delete;

  // A file descriptor by which another process gets this rank's allocation; the caller closes it.
  int share() const;

  // Maps all allocations, one behind the other: `files[i]` of rank i, of which entry `own` is ignored. The caller
  // closes the files. Throws std::runtime_error, also where the device cannot reach another one.
  void map(const std::vector<int>& files, std::size_t own);

  // Of every rank's copy, once they are mapped.
  std::vector<std::uintptr_t> copies() const;
  std::size_t copy_bytes() const { return mapping_->nbytes; }

  // `release` is called once the device has done all that it was given, by a thread that may wait; then memory goes.
  void before_unmapping(std::function<void()> release) { mapping_->releases.push_back(std::move(release)); }

 private:
  // What has to be given back, by whom it may outlive.
  struct Mapping {
    ~Mapping();

    cuda::Context context = nullptr;
    std::size_t nbytes = 0, unit = 0;  // of a copy: a multiple of the unit, by which NCCL wants it to be aligned
    cuda::Allocation own = 0;
    cuda::Address begin = 0;
    std::vector<bool> is_mapped;  // of every copy for which there are addresses
    std::vector<std::function<void()>> releases;
  };

  void map_at(std::size_t place, cuda::Allocation allocation);

  int device_;
  std::unique_ptr<Mapping> mapping_;
};

}  // namespace hvdlite
