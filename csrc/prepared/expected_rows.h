// What ranks are expected to give in an allgather, or alltoall, that comes again and again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/ascending_copy.h"

namespace hvdlite {

// Each rank tells how many rows it has for whom, and has these rows one after the other: `numbers` of this rank. Of
// each rank this one wants those of its number `column`. All numbers are at least 0.
struct GatherShape {
  std::vector<std::int64_t> numbers;
  std::size_t column;
  std::uint64_t row_bytes;
  bool is_alltoall;  // so that there is a number for each rank; else the rows are for all
};

// As much as the last time. At first the others are expected to give nothing: to make room for as much as this one
// gives could be far too much.
class ExpectedRows {
 public:
  ExpectedRows(GatherShape shape, std::uint32_t rank, std::uint32_t size);

  const GatherShape& shape() const { return shape_; }
  // Of the result.
  std::uint64_t rows() const { return rows_; }
  // That a rank gives, those of the one that gives most.
  std::uint64_t most_bytes() const { return most_bytes_; }
  // That this rank gives.
  std::uint64_t own_bytes() const { return bytes_of(shape_.numbers.data(), shape_.numbers.size()); }
  // That this rank wants of another one.
  std::uint64_t bytes_from(std::uint32_t rank) const;

  // Whether ranks have told what was expected. `told`: the numbers of a rank.
  template <class Told>
  bool are(const Told& told) const {
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      if (!std::equal(of(rank), of(rank) + shape_.numbers.size(), told(rank))) return false;
    }
    return true;
  }
  // From now on.
  template <class Told>
  void become(const Told& told) {
    std::vector<std::int64_t> numbers;
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      numbers.insert(numbers.end(), told(rank), told(rank) + shape_.numbers.size());
    }
    expect(std::move(numbers));
  }
  // Puts the rows for this rank at `target`. `bytes`: where those of a rank are.
  template <class Bytes>
  void read(std::uintptr_t target, const Bytes& bytes) const {
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      ascending_copy(target, bytes(rank) + bytes_of(of(rank), shape_.column), bytes_from(rank));
      target += bytes_from(rank);
    }
  }

 private:
  void expect(std::vector<std::int64_t> numbers);
  const std::int64_t* of(std::uint32_t rank) const { return &numbers_[rank * shape_.numbers.size()]; }
  std::uint64_t bytes_of(const std::int64_t* numbers, std::size_t columns) const;

  GatherShape shape_;
  std::uint32_t size_;
  std::vector<std::int64_t> numbers_;  // rank by rank
  std::uint64_t rows_ = 0;
  std::uint64_t most_bytes_ = 0;
};

}  // namespace hvdlite
