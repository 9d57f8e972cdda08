// The kernels of csrc/cuda as they were built in; csrc/cuda/embed.py writes them.
#pragma once

namespace hvdlite {

extern const char kKernelSource[];  // one file without includes
extern const char kKernelPtx[];     // empty where the build had no nvcc

}  // namespace hvdlite
