// Memory of GPUs that ranks share by handles of CUDA IPC: where the driver or the container has no file descriptors.
#pragma once

#include "gpu/device_memory.h"

namespace hvdlite {

// An allocation is freed when no other rank has it open any more: each says so by a pipe of whoever made it, or dies,
// which the pipe says as well.
class HandleSegment : public DeviceSegment {
 public:
  // At least `nbytes`. Contents are undefined.
  HandleSegment(int device, std::size_t nbytes);

  std::pair<std::string, int> share() override;
  void map(const std::vector<std::string>& shared, const std::vector<int>& files, std::size_t own) override;
  bool is_for_nccl() const override { return false; }

 private:
  struct Opened;

  HandleSegment(int device, std::size_t nbytes, std::unique_ptr<Opened> opened);

  Opened& opened_;
};

}  // namespace hvdlite
