// The kernels of csrc/cuda as they were built in; csrc/cuda/embed.py writes them.
#pragma once

namespace hvdlite {

// One file without includes; as PTX empty where the build had no nvcc.
extern const char kKernelSource[], kKernelPtx[];
extern const char kMulticastSource[], kMulticastPtx[];

}  // namespace hvdlite
