#include "messages/early_gather.h"

#include <cstring>
#include <utility>

namespace hvdlite {

EarlyGather::EarlyGather(ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape,
                         std::chrono::microseconds spin, double patience_s, GatherShape rows, std::uint32_t rank,
                         PacketPlaces packets, PacketRoom& room, std::uint64_t room_then)
    : EarlyAllreduce(counts, turns, look, shape, spin, patience_s),
      expected_(std::move(rows), rank, static_cast<std::uint32_t>(shape.numels.size())),
      packets_(packets),
      room_(room),
      room_then_(room_then),
      given_(shape.numels.size()) {
  given_.at(rank) = packets_.own;
  for (std::size_t i = 0; i < given_.size(); ++i) taken_.push_back(packets_.all + i * packets_.nbytes);
}

DirectCall::Result EarlyGather::run(const std::vector<std::uintptr_t>& inputs,
                                    const std::vector<std::uintptr_t>& outputs, std::uint64_t plan, std::uint64_t count,
                                    std::uint32_t heard) {
  write(inputs.at(0));
  const Result result = EarlyAllreduce::run(given_, taken_, plan, count, heard);
  if (result != Result::kDone && result != Result::kDoneAndRung) return result;
  const auto told = [&](std::uint32_t rank) { return this->told(rank); };
  const bool is_expected = expected_.are(told);
  if (!is_expected) expected_.become(told);
  if (!is_expected || expected_.most_bytes() > packets_.room) return last_.result = Result::kBegun;
  room_.note(expected_.most_bytes());
  const std::uint64_t start = expected_.shape().numbers.size() * sizeof(std::int64_t);
  expected_.read(outputs.at(0), [&](std::uint32_t rank) { return taken_[rank] + start; });
  return result;
}

// Without its rows where there is no room for them.
void EarlyGather::write(std::uintptr_t source) const {
  const auto& numbers = expected_.shape().numbers;
  const std::size_t start = numbers.size() * sizeof(std::int64_t);
  std::memcpy(reinterpret_cast<void*>(packets_.own), numbers.data(), start);
  if (expected_.own_bytes() <= packets_.room) ascending_copy(packets_.own + start, source, expected_.own_bytes());
}

const std::int64_t* EarlyGather::told(std::uint32_t rank) const {
  return reinterpret_cast<const std::int64_t*>(taken_[rank]);
}

}  // namespace hvdlite
