// Tensors of one GPU on their way to pinned memory of the host and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device_stream.h"

namespace hvdlite {

struct Copy {
  std::uintptr_t to, from;
  std::size_t nbytes;
};

// Copies on a stream of its own; nothing else on the device waits.
class DeviceCopies {
 public:
  explicit DeviceCopies(int device) : stream_(device) {}

  // After every moment of `after`; reached once all bytes are where they belong.
  std::unique_ptr<Moment> begin(const std::vector<const Moment*>& after, const std::vector<Copy>& copies);

 private:
  DeviceStream stream_;
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

  // It is never freed, since the device may yet write it.
  void leave_behind() { is_ours_ = false; }

 private:
  cuda::Context context_;
  void* memory_ = nullptr;
  std::size_t nbytes_;
  bool is_ours_ = true;
};

}  // namespace hvdlite
