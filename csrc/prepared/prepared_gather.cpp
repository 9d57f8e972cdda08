#include "prepared/prepared_gather.h"

#include <stdexcept>
#include <utility>

namespace hvdlite {

PreparedGather::PreparedGather(SmallGather& gather, Windows windows, ReadyCounts& counts, GatherShape shape,
                               Patience patience)
    : PreparedInNode(counts, &gather.places(), patience),
      gather_(gather),
      windows_(windows),
      expected_(std::move(shape), gather.rank(), gather.size()) {
  if (expected_.shape().numbers.size() > gather.most_numbers()) {
    throw std::invalid_argument("PreparedGather: too many numbers");
  }
}

void PreparedGather::begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) {
  source_ = inputs.at(0);
  target_ = outputs.at(0);
  gather_.begin(expected_.shape().numbers, {{source_, expected_.own_bytes()}});
}

PreparedGather::Result PreparedGather::finish() {
  const WaitStatus status = gather_.await_all(patience_.timeout_s);
  if (status != WaitStatus::kOk) {
    gather_.end();
    return result_of(status);
  }
  const auto told = [&](std::uint32_t rank) { return gather_.numbers(rank); };
  if (!expected_.are(told)) {
    expected_.become(told);
    return Result::kBegun;
  }
  gather_.end();
  if (expected_.most_bytes() > gather_.room(expected_.shape().numbers.size())) return result_of(exchange());
  expected_.read(target_, [&](std::uint32_t rank) { return rank == gather_.rank() ? source_ : gather_.bytes(rank); });
  return Result::kDone;
}

OrderedExchange::Result PreparedGather::exchange() const {
  const GatherShape& shape = expected_.shape();
  std::vector<OrderedExchange::Part> departures, arrivals;
  std::uintptr_t from = source_, to = target_;
  for (std::uint32_t rank = 0; rank < gather_.size(); ++rank) {
    const std::int64_t sent = shape.numbers[shape.is_alltoall ? rank : 0];
    departures.emplace_back(from, static_cast<std::uint64_t>(sent) * shape.row_bytes);
    from += departures.back().second;
    arrivals.emplace_back(to, expected_.bytes_from(rank));
    to += arrivals.back().second;
  }
  OrderedExchange& exchange = windows_.exchange;
  if (shape.is_alltoall) return exchange.alltoall(windows_.card, departures, arrivals, patience_.timeout_s);
  return exchange.spread(windows_.card, departures[0], arrivals, patience_.timeout_s);
}

}  // namespace hvdlite
