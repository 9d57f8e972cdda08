#include <string>

#include "exported.h"
#include "host_kernels.h"
#include "usable_stream.h"

namespace hvdlite::cuda {

using namespace gpusim;

namespace {

// An image is not looked at: a kernel of that name is part of the simulator (host_kernels.cpp), or there is none.
struct Loaded {
  gpusim::Context* context;
};
struct Kernel {
  gpusim::Context* context;
  std::string name;
};

Handles<Loaded, Module>& modules() {
  static auto* all = new Handles<Loaded, Module>;
  return *all;
}

Handles<Kernel, Function>& kernels() {
  static auto* all = new Handles<Kernel, Function>;
  return *all;
}

}  // namespace

Result cuModuleLoadData(Module* module, const void* image) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_REQUIRE(image != nullptr, INVALID_VALUE);
  return *module = modules().add(new Loaded{current()}), SUCCESS;
}

Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  GPUSIM_NEEDS_CONTEXT;
  const Loaded* loaded = modules().find(module);
  GPUSIM_REQUIRE(loaded != nullptr, INVALID_HANDLE);
  alignas(16) static char some[std::size_t{1} << 14];  // more than any kernel's parameters
  void* parameters[] = {some};
  GPUSIM_REQUIRE(bind_kernel(name, 1, 1, parameters), NOT_FOUND);
  return *function = kernels().add(new Kernel{loaded->context, name}), SUCCESS;
}

Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, Stream stream, void** parameters,
                      void** extra) {
  constexpr unsigned kThreadsPerBlock = 1024;
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  const Kernel* kernel = kernels().find(function);
  GPUSIM_REQUIRE(kernel != nullptr && kernel->context == used->context, INVALID_HANDLE);
  const bool is_linear = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
  GPUSIM_REQUIRE(is_linear && grid_x != 0 && block_x != 0 && block_x <= kThreadsPerBlock, INVALID_VALUE);
  GPUSIM_REQUIRE(shared == 0 && extra == nullptr, INVALID_VALUE);
  auto launch = bind_kernel(kernel->name.c_str(), grid_x, block_x, parameters);
  used->push(std::move(launch));
  return SUCCESS;
}

}  // namespace hvdlite::cuda
