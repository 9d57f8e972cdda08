// The simulated driver, by the functions that the simulated NCCL needs of it; GPUSIM_CUDA_LIBRARY names it.
#pragma once

#include <cstdint>
#include <optional>

namespace nccl_sim {

struct Driver {
  int (*retain)(void** context, int device);
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*attribute)(void* value, int attribute, unsigned long long address);
  int (*launch)(void* stream, void (*function)(void*), void* argument);

  static const Driver& get();
};

// What the driver knows of an address of a device's memory.
struct Allocation {
  std::uint64_t id, begin, nbytes;
  bool is_virtual;  // made by cuMemCreate
};

// None: it is not of a device's memory.
std::optional<Allocation> allocation_at(const void* memory);

// Where NCCL leaves open what happens: says so on stderr and ends the process.
[[noreturn]] void die(const char* what);

}  // namespace nccl_sim
