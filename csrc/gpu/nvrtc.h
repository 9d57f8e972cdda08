// NVIDIA's compiler at run time, loaded when it is needed.
#pragma once

#include <string>

namespace hvdlite {

// What the driver loads, for GPUs of this compute capability: code of the GPU where the compiler knows it, else PTX. It
// is kept in the cache, so that a machine compiles once. Throws std::runtime_error that says what is missing, or what
// the compiler said.
std::string compile_kernels(const std::string& source, int major, int minor);

// To be called before; empty: nothing is kept. A directory that cannot be written is no error.
void use_kernel_cache(const std::string& directory);

}  // namespace hvdlite
