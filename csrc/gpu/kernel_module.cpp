#include "gpu/kernel_module.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/parameters.h"
#include "gpu/device_stream.h"
#include "gpu/nvrtc.h"

namespace hvdlite {

KernelModule::KernelModule(int device, const char* ptx, const char* source, const std::vector<std::string>& names)
    : context_(primary_context(device)) {
  constexpr int kBlocksPerMultiprocessor = 8;  // of 256 threads each: as many as there is room for
  const cuda::Device handle = cuda::device_at(device);
  int multiprocessors = 0, major = 0, minor = 0;
  const auto attribute = [&](int* value, int which) {
    cuda::check(cuda::driver().device_attribute(value, which, handle), "cuDeviceGetAttribute");
  };
  attribute(&multiprocessors, cuda::kMultiprocessorCount);
  attribute(&major, cuda::kComputeCapabilityMajor);
  attribute(&minor, cuda::kComputeCapabilityMinor);
  most_blocks_ = static_cast<std::uint64_t>(multiprocessors) * kBlocksPerMultiprocessor;

  const cuda::Current current(context_);
  try {
    load(ptx, names);
  } catch (const std::runtime_error& refused) {  // there is none, or the driver is older than the nvcc of the build
    try {
      load(compile_kernels(source, major, minor), names);
    } catch (const std::runtime_error& error) {
      const std::string built_in = *ptx == '\0' ? "built without nvcc" : refused.what();
      throw std::runtime_error("the CUDA kernels of hvdlite cannot be loaded: " + built_in + "; " + error.what());
    }
  }
}

void KernelModule::load(const std::string& image, const std::vector<std::string>& names) {
  cuda::Module module;
  cuda::check(cuda::driver().module_load(&module, image.c_str()), "cuModuleLoadData");
  for (const std::string& name : names) {
    cuda::check(cuda::driver().module_function(&functions_[name], module, name.c_str()), "cuModuleGetFunction");
  }
}

cuda::Function KernelModule::find(const std::string& name) const {
  const auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : found->second;
}

void KernelModule::launch(cuda::Function kernel, std::uint64_t blocks, void* parameters, cuda::Stream stream) const {
  if (blocks == 0) return;
  const cuda::Current current(context_);
  const auto grid = static_cast<unsigned>(std::min(blocks, most_blocks_));
  cuda::check(cuda::driver().launch(kernel, grid, 1, 1, kernels::kBlockThreads, 1, 1, 0, stream, &parameters, nullptr),
              "cuLaunchKernel");
}

}  // namespace hvdlite
