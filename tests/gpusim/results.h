// What the driver's functions answer.
#pragma once

namespace gpusim {

// as in CUDA: name after CUDA_ERROR_, number
#define GPUSIM_ERRORS(E)                 \
  E(INVALID_VALUE, 1)                    \
  E(OUT_OF_MEMORY, 2)                    \
  E(NOT_INITIALIZED, 3)                  \
  E(NO_DEVICE, 100)                      \
  E(INVALID_DEVICE, 101)                 \
  E(INVALID_IMAGE, 200)                  \
  E(INVALID_CONTEXT, 201)                \
  E(PEER_ACCESS_UNSUPPORTED, 217)        \
  E(OPERATING_SYSTEM, 304)               \
  E(INVALID_HANDLE, 400)                 \
  E(NOT_FOUND, 500)                      \
  E(NOT_READY, 600)                      \
  E(HOST_MEMORY_ALREADY_REGISTERED, 712) \
  E(HOST_MEMORY_NOT_REGISTERED, 713)     \
  E(NOT_PERMITTED, 800)                  \
  E(NOT_SUPPORTED, 801)                  \
  E(STREAM_CAPTURE_UNSUPPORTED, 900)     \
  E(STREAM_CAPTURE_INVALIDATED, 901)

enum Error : int {
  SUCCESS = 0,
#define GPUSIM_ENUMERATE(name, number) name = number,
  GPUSIM_ERRORS(GPUSIM_ENUMERATE)
#undef GPUSIM_ENUMERATE
};

// Where CUDA leaves open what happens: says so on stderr and ends the process.
[[noreturn]] __attribute__((format(printf, 1, 2))) void die(const char* format, ...);

}  // namespace gpusim
