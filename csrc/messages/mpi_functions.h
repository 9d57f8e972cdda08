// What native code calls of MPI.
#pragma once

#include <cstdint>

namespace hvdlite {

// By the addresses that MPI's library has been loaded at; this code is linked to none. Requests are given by address,
// and both functions return 0 for success, in every MPI; so neither the size of a request nor any other constant has to
// be known.
class MpiFunctions {
 public:
  using Start = int (*)(void* request);
  using Test = int (*)(void* request, int* flag, void* status);

  MpiFunctions(Start start, Test test) : start_(start), test_(test) {}

  // What MPI returns: 0, or an error.
  int start(std::uintptr_t request) const { return start_(reinterpret_cast<void*>(request)); }
  // `is_done`: also where the persistent request has not been started.
  int test(std::uintptr_t request, bool& is_done) const {
    AnyStatus status;
    int flag = 0;
    const int error = test_(reinterpret_cast<void*>(request), &flag, &status);
    is_done = flag != 0;
    return error;
  }

 private:
  // Which nobody reads. MPI_STATUS_IGNORE is a constant of each MPI; the largest status has 32 bytes.
  struct alignas(16) AnyStatus {
    char bytes[256];
  };

  Start start_;
  Test test_;
};

}  // namespace hvdlite
