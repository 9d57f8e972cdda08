// The kernels of csrc/cuda, compiled for the host.
#pragma once

#include <functional>

namespace gpusim {

// What every GPU thread of a launch of kernel `name` does, with parameters that are copied; empty: no such kernel.
std::function<void()> bind_thread(const char* name, void** parameters);

// Such a launch, whose threads run one after the other; empty: no such kernel.
std::function<void()> bind_kernel(const char* name, unsigned grid, unsigned block, void** parameters);

}  // namespace gpusim
