// An allgather, or alltoall, of few bytes between nodes, in one call: an allreduce of packets, of which each rank adds
// its own to zeros for those of the others (hvdlite/memory/packets.py).
#pragma once

#include <cstdint>
#include <vector>

#include "messages/early_allreduce.h"
#include "messages/packet_room.h"
#include "prepared/expected_rows.h"

namespace hvdlite {

// Of all ranks, in memory that lives as long: numbers, and behind them bytes where there is room for them.
struct PacketPlaces {
  std::uintptr_t own;    // that of this rank, as it is sent
  std::uintptr_t all;    // those of all, one after the other, as they come
  std::uint64_t nbytes;  // of each
  std::uint64_t room;
};

// Callers make room for what the ranks gave the last time. `run` ends with kBegun also where all have come (`progress`
// is kDone then) and give something else, which is expected the next time, or more than there is room for: numbers were
// told, and neither were rows read, nor was noted what room they take.
class EarlyGather : public EarlyAllreduce {
 public:
  // `shape`: of the packets. `room`, which has to live as long: where it is not `room_then`, these packets are not
  // those that others send.
  EarlyGather(ReadyCounts& counts, EarlyTurns& turns, PoliteLook& look, EarlyShape shape,
              std::chrono::microseconds spin, double patience_s, GatherShape rows, std::uint32_t rank,
              PacketPlaces packets, PacketRoom& room, std::uint64_t room_then);

  bool is_valid() const { return room_.now() == room_then_; }
  bool can_run() const override { return is_valid() && EarlyAllreduce::can_run(); }
  std::uint64_t result_rows() const override { return expected_.rows(); }

  Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs, std::uint64_t plan,
             std::uint64_t count, std::uint32_t heard) override;

 private:
  void write(std::uintptr_t source) const;
  const std::int64_t* told(std::uint32_t rank) const;

  ExpectedRows expected_;
  PacketPlaces packets_;
  PacketRoom& room_;
  std::uint64_t room_then_;
  std::vector<std::uintptr_t> given_;
  std::vector<std::uintptr_t> taken_;
};

}  // namespace hvdlite
