#include "prepared/expected_rows.h"

namespace hvdlite {

ExpectedRows::ExpectedRows(GatherShape shape, std::uint32_t rank, std::uint32_t size)
    : shape_(std::move(shape)), size_(size) {
  const auto& own = shape_.numbers;
  std::vector<std::int64_t> all(size * own.size());
  std::copy(own.begin(), own.end(), all.begin() + static_cast<std::ptrdiff_t>(rank * own.size()));
  expect(std::move(all));
}

void ExpectedRows::expect(std::vector<std::int64_t> numbers) {
  numbers_ = std::move(numbers);
  rows_ = most_bytes_ = 0;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    rows_ += static_cast<std::uint64_t>(of(rank)[shape_.column]);
    most_bytes_ = std::max(most_bytes_, bytes_of(of(rank), shape_.numbers.size()));
  }
}

std::uint64_t ExpectedRows::bytes_from(std::uint32_t rank) const {
  return static_cast<std::uint64_t>(of(rank)[shape_.column]) * shape_.row_bytes;
}

std::uint64_t ExpectedRows::bytes_of(const std::int64_t* numbers, std::size_t columns) const {
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i < columns; ++i) rows += static_cast<std::uint64_t>(numbers[i]);
  return rows * shape_.row_bytes;
}

}  // namespace hvdlite
