// Kernels of csrc/cuda on a GPU, by their names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gpu/cuda_driver.h"

namespace hvdlite {

class KernelModule {
 public:
  // Loads `ptx`, or what the compiler at run time makes of `source`. Throws std::runtime_error that says why neither
  // can be.
  KernelModule(int device, const char* ptx, const char* source, const std::vector<std::string>& names);
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Null where there is none of this name.
  cuda::Function find(const std::string& name) const;

  // Enqueues it for as many blocks of kBlockThreads as there is work for; no more than the GPU has room for.
  void launch(cuda::Function kernel, std::uint64_t blocks, void* parameters, cuda::Stream stream) const;

 private:
  void load(const std::string& image, const std::vector<std::string>& names);

  cuda::Context context_;
  std::uint64_t most_blocks_;
  std::map<std::string, cuda::Function> functions_;
};

}  // namespace hvdlite
