// Memory of GPUs that ranks share by file descriptors. The driver keeps it as long as anybody has it mapped.
#pragma once

#include "gpu/device_memory.h"

namespace hvdlite {

class FileSegment : public DeviceSegment {
 public:
  // At least `nbytes`, rounded up to what the driver gives. Contents are undefined.
  FileSegment(int device, std::size_t nbytes);

  std::pair<std::string, int> share() override;  // no bytes
  void map(const std::vector<std::string>& shared, const std::vector<int>& files, std::size_t own) override;
  bool is_for_nccl() const override { return true; }

  int device() const { return device_; }
  cuda::Allocation allocation() const;  // of this rank

 private:
  struct Mapping;

  FileSegment(int device, std::size_t nbytes, std::unique_ptr<Mapping> mapping);
  void map_at(std::size_t place, cuda::Allocation allocation);

  int device_;
  Mapping& mapping_;
};

}  // namespace hvdlite
