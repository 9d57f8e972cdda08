// Where ranks meet: a file in memory, which the process that made the unique id has open. It is gone with the
// processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

namespace nccl_sim {

constexpr int kMostRanks = 16;
constexpr std::size_t kSlots = 2, kSlotBytes = 1 << 14;  // a rank may be so far ahead of the last one

// What one rank has to do, compared between ranks.
struct Description {
  int kind, dtype, op, root;
  std::size_t count;
  std::int64_t place = -1;  // in registered memory, of what other ranks reach: see RegisteredMemory

  bool operator==(const Description& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};
constexpr int kReduceToAll = 0, kReduceToRoot = 1, kBroadcast = 2;

struct Slot {
  Description description;
  char data[kSlotBytes];
};

// What a rank registers as a window, compared between ranks.
struct Window {
  std::uint64_t nbytes, calls_before;

  bool operator==(const Window& other) const { return nbytes == other.nbytes && calls_before == other.calls_before; }
};

// The file.
struct Meeting {
  std::uint64_t nonce;
  std::atomic<std::uint32_t> changes;  // a futex
  std::atomic<int> joined;
  std::atomic<bool> is_closed;  // by the process that made it, once all have it open
  struct {
    alignas(64) std::atomic<std::uint64_t> posted, consumed;  // pieces of a slot's size
  } progress[kMostRanks];
  Slot slots[kMostRanks][kSlots];
  struct {
    std::atomic<std::uint64_t> made;
    Window last[2];  // nobody begins a window before all have come to the one before
  } windows[kMostRanks];

  void ring() {
    changes.fetch_add(1);
    syscall(SYS_futex, &changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  void sleep(std::uint32_t seen) {  // for a while, since an abort rings nobody
    const timespec limit{0, 2'000'000};
    syscall(SYS_futex, &changes, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
};

// The unique id: where the file is.
struct Place {
  std::uint64_t nonce;
  int pid, fd;
};

}  // namespace nccl_sim
