#include "host_kernels.h"

#include <map>
#include <string>

#include "cuda/kernels.h"
#include "cuda/multicast.h"
#include "gpu_thread.h"

namespace gpusim {
namespace {

using Kernel = std::function<void()> (*)(const void* parameters);

template <class Parameters, void (*kKernel)(const Parameters&)>
std::function<void()> with_copy(const void* parameters) {
  return [copy = *static_cast<const Parameters*>(parameters)] { kKernel(copy); };
}

const std::map<std::string, Kernel>& kernels() {
  using namespace hvdlite::kernels;
  static const std::map<std::string, Kernel> all{{"fill", with_copy<Fill, fill>},
                                                 {"multicast_store", with_copy<MulticastStore, multicast_store>},
#define HVDLITE_ADD(name, E) {"multicast_sum_" #name, with_copy<MulticastSum, multicast_sum_##name>},
                                                 HVDLITE_ADDED_BY_MULTICAST(HVDLITE_ADD)
#undef HVDLITE_ADD
#define HVDLITE_ADD(name, E) {"reduce_" #name, with_copy<Reduce, reduce_##name>},
                                                     HVDLITE_REDUCED(HVDLITE_ADD)
#undef HVDLITE_ADD
#define HVDLITE_ADD(from, From, to, To)                            \
  {"pack_" #from "_" #to, with_copy<Tensors, pack_##from##_##to>}, \
      {"unpack_" #from "_" #to, with_copy<Tensors, unpack_##from##_##to>},
                                                         HVDLITE_CASTS(HVDLITE_ADD)
#undef HVDLITE_ADD
#define HVDLITE_ADD(bytes, E)                                   \
  {"pack_copy_" #bytes, with_copy<Tensors, pack_copy_##bytes>}, \
      {"unpack_copy_" #bytes, with_copy<Tensors, unpack_copy_##bytes>},
                                                             HVDLITE_COPIES(HVDLITE_ADD)
#undef HVDLITE_ADD
  };
  return all;
}

}  // namespace

std::function<void()> bind_thread(const char* name, void** parameters) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second(parameters[0]);
}

std::function<void()> bind_kernel(const char* name, unsigned grid, unsigned block, void** parameters) {
  const std::function<void()> thread = bind_thread(name, parameters);
  if (thread == nullptr) return nullptr;
  return [=] {
    for (unsigned b = 0; b < grid; ++b) {
      for (unsigned t = 0; t < block; ++t) {
        become(t, b, block, grid);
        thread();
      }
    }
  };
}

}  // namespace gpusim
