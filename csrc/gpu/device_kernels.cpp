#include "gpu/device_kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "cuda/parameters.h"
#include "gpu/kernel_image.h"
#include "kernels/reduce.h"
#include "kernels/scaled_integer.h"

namespace hvdlite {
namespace {

std::vector<std::string> kernel_names() {
  std::vector<std::string> names{"fill"};
#define HVDLITE_ADD(name, E) names.push_back("reduce_" #name);
  HVDLITE_REDUCED(HVDLITE_ADD)
#undef HVDLITE_ADD
#define HVDLITE_ADD(from, From, to, To) names.insert(names.end(), {"pack_" #from "_" #to, "unpack_" #from "_" #to});
  HVDLITE_CASTS(HVDLITE_ADD)
#undef HVDLITE_ADD
#define HVDLITE_ADD(bytes, E) names.insert(names.end(), {"pack_copy_" #bytes, "unpack_copy_" #bytes});
  HVDLITE_COPIES(HVDLITE_ADD)
#undef HVDLITE_ADD
  return names;
}

std::uint64_t parts(std::uint64_t whole, std::uint64_t part) { return (whole + part - 1) / part; }

std::uint64_t elements_at_once(std::size_t bytes) {
  return std::min<std::uint64_t>(kernels::kVectorBytes / bytes, kernels::kMostReduced);
}

// Elements up to the first at which all arrays are aligned to groups; numel where there is none.
std::uint64_t head_of(const kernels::Reduce& p, std::size_t bytes) {
  const std::uint64_t group = elements_at_once(bytes);
  const auto head = [&](kernels::Address array) { return (group - array / bytes % group) % group; };
  const std::uint64_t first = head(p.sources[0]);
  const auto is_alike = [&](kernels::Address array) { return head(array) == first; };
  const bool alike = std::all_of(p.sources, p.sources + p.source_count, is_alike) &&
                     std::all_of(p.destinations, p.destinations + p.destination_count, is_alike);
  return alike ? std::min<std::uint64_t>(first, p.numel) : p.numel;
}

template <class Integer>
std::uint64_t bits_of_integer(double value) {
  return static_cast<std::make_unsigned_t<Integer>>(scaled_integer<Integer>(1, value));
}

// `value` as an element, in the lowest bits.
std::uint64_t bits_of(DType dtype, double value) {
  switch (dtype) {
    case DType::kUint8:
      return bits_of_integer<std::uint8_t>(value);
    case DType::kInt8:
      return bits_of_integer<std::int8_t>(value);
    case DType::kInt16:
      return bits_of_integer<std::int16_t>(value);
    case DType::kInt32:
      return bits_of_integer<std::int32_t>(value);
    case DType::kInt64:
      return bits_of_integer<std::int64_t>(value);
    case DType::kBool:
      return value != 0;
    default: {
      std::uint64_t bits = 0;
      TensorList({reinterpret_cast<std::uintptr_t>(&value)}, {1}, {0})
          .pack(reinterpret_cast<std::uintptr_t>(&bits), 0, 1, DType::kFloat64, dtype, 1.0);
      return bits;
    }
  }
}

}  // namespace

const DeviceKernels& DeviceKernels::of(int device) {
  static std::mutex mutex;
  static auto* loaded = new std::map<int, std::unique_ptr<DeviceKernels>>;  // of a driver that may be gone at the end
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<DeviceKernels>& kernels = (*loaded)[device];
  if (kernels == nullptr) kernels.reset(new DeviceKernels(device));
  return *kernels;
}

DeviceKernels::DeviceKernels(int device) : module_(device, kKernelPtx, kKernelSource, kernel_names()) {}

cuda::Function DeviceKernels::move_kernel(const std::string& verb, DType from, DType to) const {
  const auto found = module_.find(verb + (from == to ? "_copy_" + std::to_string(item_bytes(from))
                                                     : std::string("_") + name_of(from) + "_" + name_of(to)));
  if (found != nullptr) return found;
  throw std::invalid_argument(std::string(name_of(from)) + " cannot be cast to " + name_of(to));
}

void DeviceKernels::move(cuda::Function kernel, const TensorList& tensors, cuda::Address buffer, std::uint64_t begin,
                         std::uint64_t end, std::size_t buffer_item_bytes, cuda::Stream stream) const {
  kernels::Tensors p;
  std::size_t i = tensors.first_ending_after(begin);
  const auto is_any_left = [&] { return i < tensors.size() && tensors.begin(i) < end; };
  for (std::uint64_t at = begin; at < end; at = p.end) {
    p.buffer = buffer + (at - begin) * buffer_item_bytes;
    p.begin = at;
    for (p.count = 0; p.count < kernels::kTableTensors && is_any_left(); ++i) {
      p.tensors[p.count++] = {tensors.address(i), tensors.begin(i), tensors.end(i)};
    }
    p.end = is_any_left() ? p.tensors[p.count - 1].end : end;
    module_.launch(kernel, parts(p.end - p.begin, kernels::kTileNumel), &p, stream);
  }
}

void DeviceKernels::pack(const TensorList& tensors, cuda::Address buffer, std::uint64_t begin, std::uint64_t end,
                         DType from, DType to, cuda::Stream stream) const {
  move(move_kernel("pack", from, to), tensors, buffer, begin, end, item_bytes(to), stream);
}

void DeviceKernels::unpack(const TensorList& tensors, cuda::Address buffer, std::uint64_t begin, std::uint64_t end,
                           DType from, DType to, cuda::Stream stream) const {
  move(move_kernel("unpack", from, to), tensors, buffer, begin, end, item_bytes(from), stream);
}

void DeviceKernels::reduce(const std::vector<std::uintptr_t>& destinations, const std::vector<std::uintptr_t>& sources,
                           std::uint64_t numel, DType dtype, Op op, double prescale, double postscale,
                           cuda::Stream stream) const {
  if (sources.empty() || std::max(sources.size(), destinations.size()) > kernels::kMaxArrays) {
    throw std::invalid_argument("reduce: 1 to 64 sources, and up to 64 destinations");
  }
  const Reducer reducer(dtype, op, prescale, postscale);  // throws where there is no such reduction
  kernels::Reduce p;
  p.numel = numel;
  p.prescale = prescale;
  p.postscale = postscale;
  p.divisor = reducer.divisor();
  p.scaled = prescale != 1.0 || postscale != 1.0;
  p.op = static_cast<kernels::Combining>(op);
  p.source_count = static_cast<unsigned>(sources.size());
  p.destination_count = static_cast<unsigned>(destinations.size());
  std::copy(sources.begin(), sources.end(), p.sources);
  std::copy(destinations.begin(), destinations.end(), p.destinations);
  const std::size_t bytes = item_bytes(dtype);
  p.head = head_of(p, bytes);
  const std::uint64_t per_thread = p.head == numel ? 1 : elements_at_once(bytes);
  module_.launch(module_.find(std::string("reduce_") + name_of(dtype)),
                 parts(parts(numel, per_thread), kernels::kBlockThreads), &p, stream);
}

void DeviceKernels::fill(cuda::Address address, std::uint64_t numel, DType dtype, double value,
                         cuda::Stream stream) const {
  const std::size_t bytes = item_bytes(dtype);
  kernels::Fill p{address, numel * bytes, bits_of(dtype, value)};
  for (std::size_t width = bytes; width < sizeof p.pattern; width *= 2) p.pattern |= p.pattern << (8 * width);
  module_.launch(module_.find("fill"), parts(p.nbytes, kernels::kVectorBytes * kernels::kBlockThreads), &p, stream);
}

const char* kernel_image() { return kKernelPtx[0] == '\0' ? "nvrtc" : "ptx"; }

}  // namespace hvdlite
