#include "prepared_gather.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ascending_copy.h"

namespace hvdlite {

PreparedGather::PreparedGather(SmallGather& gather, ReadyCounts& counts, GatherShape shape, Patience patience)
    : PreparedInNode(counts, &gather.places(), patience), gather_(gather), shape_(std::move(shape)) {
  const auto& own = shape_.numbers;
  if (own.size() > gather.most_numbers() || bytes_of(own.data(), own.size()) > gather.room(own.size())) {
    throw std::invalid_argument("PreparedGather: too much for one place");
  }
  for (std::uint32_t rank = 0; rank < gather.size(); ++rank) expected_.insert(expected_.end(), own.begin(), own.end());
  rows_ = gather.size() * static_cast<std::uint64_t>(own.at(shape_.column));
}

void PreparedGather::begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) {
  source_ = inputs.at(0);
  target_ = outputs.at(0);
  gather_.begin(shape_.numbers, {{source_, bytes_of(shape_.numbers.data(), shape_.numbers.size())}});
}

PreparedGather::Result PreparedGather::finish() {
  const WaitStatus status = gather_.await_all(patience_.timeout_s);
  if (status != WaitStatus::kOk) {
    gather_.end();
    return result_of(status);
  }
  if (!is_as_expected()) {
    expect_the_same();
    return Result::kBegun;
  }
  read();
  gather_.end();
  return Result::kDone;
}

std::uint64_t PreparedGather::bytes_of(const std::int64_t* numbers, std::size_t columns) const {
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i < columns; ++i) rows += static_cast<std::uint64_t>(numbers[i]);
  return rows * shape_.row_bytes;
}

bool PreparedGather::is_as_expected() const {
  const std::size_t width = shape_.numbers.size();
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    if (!std::equal(&expected_[rank * width], &expected_[rank * width] + width, gather_.numbers(rank))) return false;
  }
  return true;
}

// Unless some rank had no room for all of it: such calls have to be done otherwise each time.
void PreparedGather::expect_the_same() {
  const std::size_t width = shape_.numbers.size();
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    if (bytes_of(gather_.numbers(rank), width) > gather_.room(width)) return;
  }
  rows_ = 0;
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    std::copy_n(gather_.numbers(rank), width, &expected_[rank * width]);
    rows_ += static_cast<std::uint64_t>(expected_[rank * width + shape_.column]);
  }
}

void PreparedGather::read() const {
  const std::size_t width = shape_.numbers.size();
  std::uintptr_t at = target_;
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    const std::int64_t* const numbers = &expected_[rank * width];
    const std::uintptr_t bytes = rank == gather_.rank() ? source_ : gather_.bytes(rank);
    const std::uint64_t taken = static_cast<std::uint64_t>(numbers[shape_.column]) * shape_.row_bytes;
    ascending_copy(at, bytes + bytes_of(numbers, shape_.column), taken);
    at += taken;
  }
}

}  // namespace hvdlite
