// GPUs whose memory has one address beside its own ones. What processes know of a team is in a file that they share.
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "cuda/portable.h"
#include "memory.h"

namespace gpusim {

class MulticastTeam {
 public:
  // Null: there is no more memory.
  static std::shared_ptr<MulticastTeam> create(unsigned devices, std::size_t nbytes);
  // Null: the file is another one.
  static std::shared_ptr<MulticastTeam> opened(int fd);

  ~MulticastTeam();
  MulticastTeam(const MulticastTeam&) = delete;
  MulticastTeam& operator=(const MulticastTeam&) = delete;

  int fd() const { return fd_; }
  std::size_t nbytes() const;

  // Devices by their numbers in the machine. False: it is in already, or all are.
  bool add(int physical);
  bool is_complete() const;
  // The memory of a device, all of it, which is a file. False: the device is not in, or has memory here.
  bool bind(int physical, int file);
  bool unbind(int physical);

  // Where the memory of all devices is in this process, `offset` bytes from its begin, in an order of the switch's own.
  // Ends the process where that of a device is not there, or is no longer.
  hvdlite::kernels::Bound at(std::size_t offset);

 private:
  struct Shared;

  MulticastTeam(int fd, Shared* shared) : fd_(fd), shared_(shared) {}

  int fd_;
  Shared* shared_;
  std::map<int, Address> mapped_;  // by device
};

}  // namespace gpusim
