// Tensors of one GPU on their way to pinned memory of the host and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_driver.h"

namespace hvdlite {

// A point in a stream of the user's: all that was enqueued before it has happened once it is reached.
class Moment {
 public:
  // Of `stream`, now. Throws std::runtime_error, also where the stream is being captured into a graph.
  Moment(int device, std::uintptr_t stream);
  ~Moment();
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

  cuda::Event event() const { return event_; }

 private:
  cuda::Context context_;
  cuda::Event event_ = nullptr;
};

struct Copy {
  std::uintptr_t to, from;
  std::size_t nbytes;
};

// Copies on a stream of its own; a call returns once its bytes are where they belong. The thread sleeps meanwhile, and
// nothing else on the device waits. One call at a time.
class DeviceCopies {
 public:
  explicit DeviceCopies(int device);
  ~DeviceCopies();
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  // After every moment of `after`.
  void run(const std::vector<const Moment*>& after, const std::vector<Copy>& copies);

 private:
  cuda::Context context_;
  cuda::Stream stream_ = nullptr;
  cuda::Event done_ = nullptr;
};

// Host memory that the device reads and writes by itself.
class PinnedMemory {
 public:
  PinnedMemory(int device, std::size_t nbytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
  std::size_t nbytes() const { return nbytes_; }

 private:
  cuda::Context context_;
  void* memory_ = nullptr;
  std::size_t nbytes_;
};

}  // namespace hvdlite
