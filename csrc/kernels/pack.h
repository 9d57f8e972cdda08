// Tensors in and out of a fusion buffer, cast and scaled on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/elements.h"

namespace hvdlite {

// Tensor i takes elements [offsets[i], offsets[i] + numels[i]) of the fused layout. Offsets ascend and do not overlap.
// Address 0 stands for zeros that nobody stored: packed as zeros, skipped by unpack.
class TensorList {
 public:
  TensorList(std::vector<std::uintptr_t> addresses, const std::vector<std::uint64_t>& numels,
             std::vector<std::uint64_t> offsets);

  // Elements [begin, end) of the fused layout to and from a buffer whose element `begin` is at `buffer`.
  void pack(std::uintptr_t buffer, std::uint64_t begin, std::uint64_t end, DType from, DType to, double scale) const;
  void unpack(std::uintptr_t buffer, std::uint64_t begin, std::uint64_t end, DType from, DType to, double scale) const;

  // Where elements [begin, end) lie if one tensor, of elements of `bytes`, has them all; else 0.
  std::uintptr_t address_of(std::uint64_t begin, std::uint64_t end, std::size_t bytes) const;

  // The same layout of other tensors.
  void move_to(const std::vector<std::uintptr_t>& addresses);

  std::size_t size() const { return addresses_.size(); }
  std::uintptr_t address(std::size_t i) const { return addresses_[i]; }
  std::uint64_t begin(std::size_t i) const { return begins_[i]; }
  std::uint64_t end(std::size_t i) const { return ends_[i]; }
  std::size_t first_ending_after(std::uint64_t element) const;

 private:
  std::vector<std::uintptr_t> addresses_;
  std::vector<std::uint64_t> begins_;
  std::vector<std::uint64_t> ends_;
};

}  // namespace hvdlite
