#include "prepared_gather.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ascending_copy.h"

namespace hvdlite {

PreparedGather::PreparedGather(SmallGather& gather, Windows windows, ReadyCounts& counts, GatherShape shape,
                               Patience patience)
    : PreparedInNode(counts, &gather.places(), patience), gather_(gather), windows_(windows), shape_(std::move(shape)) {
  const auto& own = shape_.numbers;
  if (own.size() > gather.most_numbers()) throw std::invalid_argument("PreparedGather: too many numbers");
  std::vector<std::int64_t> all(gather.size() * own.size());
  std::copy(own.begin(), own.end(), all.begin() + static_cast<std::ptrdiff_t>(gather.rank() * own.size()));
  expect(std::move(all));
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
  gather_.end();
  if (!fits_) return result_of(exchange());
  read();
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

void PreparedGather::expect_the_same() {
  std::vector<std::int64_t> told;
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    const std::int64_t* const numbers = gather_.numbers(rank);
    told.insert(told.end(), numbers, numbers + shape_.numbers.size());
  }
  expect(std::move(told));
}

void PreparedGather::expect(std::vector<std::int64_t> numbers) {
  const std::size_t width = shape_.numbers.size();
  expected_ = std::move(numbers);
  rows_ = 0;
  fits_ = true;
  for (std::size_t i = 0; i < expected_.size(); i += width) {
    rows_ += static_cast<std::uint64_t>(expected_[i + shape_.column]);
    fits_ = fits_ && bytes_of(&expected_[i], width) <= gather_.room(width);
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

OrderedExchange::Result PreparedGather::exchange() const {
  const std::size_t width = shape_.numbers.size();
  std::vector<OrderedExchange::Part> departures, arrivals;
  std::uintptr_t from = source_, to = target_;
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    const std::int64_t sent = shape_.numbers[shape_.is_alltoall ? rank : 0];
    departures.emplace_back(from, static_cast<std::uint64_t>(sent) * shape_.row_bytes);
    from += departures.back().second;
    const std::int64_t received = expected_[rank * width + shape_.column];
    arrivals.emplace_back(to, static_cast<std::uint64_t>(received) * shape_.row_bytes);
    to += arrivals.back().second;
  }
  OrderedExchange& exchange = windows_.exchange;
  if (shape_.is_alltoall) return exchange.alltoall(windows_.card, departures, arrivals, patience_.timeout_s);
  return exchange.spread(windows_.card, departures[0], arrivals, patience_.timeout_s);
}

}  // namespace hvdlite
