#include "kernels/pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/scaled_integer.h"
#include "kernels/with_subnormals.h"

namespace hvdlite {
namespace {

// destination[i] = factor * source[i]; the arrays do not overlap, or are the same and of one type.
using CastKernel = void (*)(char* destination, const char* source, std::uint64_t numel, double factor);

}  // namespace
}  // namespace hvdlite

#define HVDLITE_KERNELS "pack_kernels.h"
#include "kernels/for_each_instruction_set.h"

namespace hvdlite {
namespace {

CastKernel kernel_for(DType from, DType to) {
  switch (instruction_set()) {
#if HVDLITE_X86
    case InstructionSet::kAvx512:
      return avx512::find_kernel(from, to);
    case InstructionSet::kAvx2:
      return avx2::find_kernel(from, to);
#endif
    default:
      return plain::find_kernel(from, to);
  }
}

// One way of moving elements: from, to, factor.
class Mover {
 public:
  Mover(DType from, DType to, double factor)
      : from_bytes_(item_bytes(from)),
        to_bytes_(item_bytes(to)),
        factor_(factor),
        plain_copy_(from == to && factor == 1.0) {
    if (plain_copy_) return;
    kernel_ = kernel_for(from, to);
    if (kernel_ == nullptr) {
      throw std::invalid_argument("dtype " + std::to_string(static_cast<int>(from)) + " cannot be cast to " +
                                  std::to_string(static_cast<int>(to)) + " or scaled");
    }
  }

  void move(std::uintptr_t destination, std::uintptr_t source, std::uint64_t numel) const {
    auto* to = reinterpret_cast<char*>(destination);
    const auto* from = reinterpret_cast<const char*>(source);
    if (!plain_copy_) {
      const WithSubnormals computed;
      kernel_(to, from, numel, factor_);
    } else if (to != from) {  // else it lives at its place
      std::memcpy(to, from, numel * to_bytes_);
    }
  }

  void zero(std::uintptr_t destination, std::uint64_t numel) const {
    std::memset(reinterpret_cast<char*>(destination), 0, numel * to_bytes_);
  }

  std::size_t from_bytes() const { return from_bytes_; }
  std::size_t to_bytes() const { return to_bytes_; }

 private:
  std::size_t from_bytes_;
  std::size_t to_bytes_;
  double factor_;
  bool plain_copy_;
  CastKernel kernel_ = nullptr;
};

}  // namespace

TensorList::TensorList(std::vector<std::uintptr_t> addresses, const std::vector<std::uint64_t>& numels,
                       std::vector<std::uint64_t> offsets)
    : addresses_(std::move(addresses)), begins_(std::move(offsets)) {
  if (addresses_.size() != numels.size() || addresses_.size() != begins_.size()) {
    throw std::invalid_argument("TensorList: addresses, numels and offsets must be of equal length");
  }
  ends_.reserve(numels.size());
  std::uint64_t last_end = 0;
  for (std::size_t i = 0; i < numels.size(); ++i) {
    if (begins_[i] < last_end) throw std::invalid_argument("TensorList: offsets must ascend and not overlap");
    last_end = begins_[i] + numels[i];
    ends_.push_back(last_end);
  }
}

void TensorList::move_to(const std::vector<std::uintptr_t>& addresses) {
  if (addresses.size() != begins_.size()) throw std::invalid_argument("TensorList: an address per tensor is needed");
  addresses_ = addresses;
}

std::size_t TensorList::first_ending_after(std::uint64_t element) const {
  return static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), element) - ends_.begin());
}

std::uintptr_t TensorList::address_of(std::uint64_t begin, std::uint64_t end, std::size_t bytes) const {
  const std::size_t i = first_ending_after(begin);
  if (i == begins_.size() || addresses_[i] == 0 || begin < begins_[i] || end > ends_[i]) return 0;
  return addresses_[i] + (begin - begins_[i]) * bytes;
}

void TensorList::pack(std::uintptr_t buffer, std::uint64_t begin, std::uint64_t end, DType from, DType to,
                      double scale) const {
  const Mover mover(from, to, scale);
  std::uint64_t at = begin;
  const auto place = [&] { return buffer + (at - begin) * mover.to_bytes(); };
  for (std::size_t i = first_ending_after(begin); i < begins_.size() && begins_[i] < end; ++i) {
    const std::uint64_t start = std::max(begins_[i], begin);
    const std::uint64_t stop = std::min(ends_[i], end);
    if (start > at) mover.zero(place(), start - at);
    at = start;
    if (addresses_[i] == 0) {
      mover.zero(place(), stop - start);
    } else {
      mover.move(place(), addresses_[i] + (start - begins_[i]) * mover.from_bytes(), stop - start);
    }
    at = stop;
  }
  if (at < end) mover.zero(place(), end - at);
}

void TensorList::unpack(std::uintptr_t buffer, std::uint64_t begin, std::uint64_t end, DType from, DType to,
                        double scale) const {
  const Mover mover(from, to, scale);
  for (std::size_t i = first_ending_after(begin); i < begins_.size() && begins_[i] < end; ++i) {
    if (addresses_[i] == 0) continue;
    const std::uint64_t start = std::max(begins_[i], begin);
    const std::uint64_t stop = std::min(ends_[i], end);
    mover.move(addresses_[i] + (start - begins_[i]) * mover.to_bytes(), buffer + (start - begin) * mover.from_bytes(),
               stop - start);
  }
}

}  // namespace hvdlite
