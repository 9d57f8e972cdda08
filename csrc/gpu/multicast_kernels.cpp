#include "gpu/multicast_kernels.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/parameters.h"
#include "gpu/kernel_image.h"

namespace hvdlite {
namespace {

std::vector<std::string> kernel_names() {
  std::vector<std::string> names{"multicast_store"};
#define HVDLITE_ADD(name, E) names.push_back("multicast_sum_" #name);
  HVDLITE_ADDED_BY_MULTICAST(HVDLITE_ADD)
#undef HVDLITE_ADD
  return names;
}

void require_vectors(cuda::Address one, cuda::Address other, std::uint64_t nbytes) {
  if ((one | other | nbytes) % kernels::kVectorBytes != 0) {
    throw std::invalid_argument("multicast takes whole vectors of 16 bytes");
  }
}

std::uint64_t blocks_for(std::uint64_t vectors) {
  return (vectors + kernels::kBlockThreads - 1) / kernels::kBlockThreads;
}

}  // namespace

const MulticastKernels& MulticastKernels::of(int device) {
  static std::mutex mutex;
  static auto* loaded =
      new std::map<int, std::unique_ptr<MulticastKernels>>;  // of a driver that may be gone at the end
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<MulticastKernels>& kernels = (*loaded)[device];
  if (kernels == nullptr) kernels.reset(new MulticastKernels(device));
  return *kernels;
}

MulticastKernels::MulticastKernels(int device) : module_(device, kMulticastPtx, kMulticastSource, kernel_names()) {}

void MulticastKernels::store(cuda::Address multicast, cuda::Address source, std::uint64_t nbytes,
                             cuda::Stream stream) const {
  require_vectors(multicast, source, nbytes);
  kernels::MulticastStore p{multicast, source, nbytes / kernels::kVectorBytes};
  module_.launch(module_.find("multicast_store"), blocks_for(p.vectors), &p, stream);
}

void MulticastKernels::sum(cuda::Address destination, cuda::Address multicast, std::uint64_t nbytes, DType dtype,
                           cuda::Stream stream) const {
  require_vectors(multicast, destination, nbytes);
  const cuda::Function kernel = module_.find(std::string("multicast_sum_") + name_of(dtype));
  if (kernel == nullptr) throw std::invalid_argument(std::string("multicast does not add up ") + name_of(dtype));
  kernels::MulticastSum p{multicast, destination, nbytes / kernels::kVectorBytes};
  module_.launch(kernel, blocks_for(p.vectors), &p, stream);
}

}  // namespace hvdlite
