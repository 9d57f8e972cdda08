// What ranks do to one another through shared memory, by threads of one process, which is what ThreadSanitizer sees
// into. The data that they exchange is plain, so every order that csrc/ promises and does not keep is a data race.
//
// ranks_as_threads CASE exits with 0, or says on stderr what failed; without a case it names all.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "as_threads.h"
#include "kernels/elements.h"
#include "kernels/pack.h"
#include "node/ready_counts.h"
#include "node/small_allreduce.h"
#include "node/staged_allreduce.h"
#include "nodes_as_threads.h"
#include "ordered_as_threads.h"
#include "prepared_as_threads.h"
#include "waiting/deadline.h"
#include "waiting/heartbeat.h"
#include "waiting/signal.h"
#include "waiting/socket_bell.h"

namespace {

using namespace hvdlite;

void barrier(int spin_us) {
  constexpr int kSize = 3;
  const Page page(kSize);
  std::vector<int> turns(kSize);
  on_ranks(kSize, [&](int rank) {
    Barrier barrier = page.barrier(rank, spin_us);
    for (int turn = 1; turn <= 1000; ++turn) {
      turns[rank] = turn;
      REQUIRE(barrier.wait(kLongS) == WaitStatus::kOk);
      for (const int theirs : turns) REQUIRE(theirs == turn);
      REQUIRE(barrier.wait(kLongS) == WaitStatus::kOk);
    }
    REQUIRE(barrier.late().empty());
  });
}

void barrier_timeout() {
  constexpr int kSize = 3;
  const Page page(kSize);
  on_ranks(kSize, [&](int rank) {
    Barrier barrier = page.barrier(rank, 0);
    REQUIRE(barrier.wait(kLongS) == WaitStatus::kOk);
    if (rank == 0) return;
    REQUIRE(barrier.wait(0.05) == WaitStatus::kTimeout);
    REQUIRE(barrier.late().front() == 0);
  });
}

// Rank 0 gives up and says why before it sets the abort word.
void barrier_abort(int spin_us) {
  constexpr int kSize = 3;
  for (int turn = 0; turn < 20; ++turn) {
    const Page page(kSize);
    int reason = 0;
    on_ranks(kSize, [&](int rank) {
      if (rank == 0) {
        reason = turn;
        store<std::uint32_t>(page.abort_address(), 1);
        futex_wake_all(page.barrier_word());
      } else {
        REQUIRE(page.barrier(rank, spin_us).wait(kLongS) == WaitStatus::kAborted);
        REQUIRE(reason == turn);
      }
    });
  }
}

void wait_for_ring(Doorbell& bell, std::uint32_t seen) {
  const auto until = time_after(kLongS);
  while (bell.wait_once(seen, until) == seen) REQUIRE(Clock::now() < until);
}

void doorbell_ping_pong() {
  Doorbell bells[2] = {};
  int letter = 0;
  on_ranks(2, [&](int rank) {
    for (std::uint32_t turn = 0; turn < 3000; ++turn) {
      if (rank == 0) {
        ++letter;
        bells[1].ring();
      }
      wait_for_ring(bells[rank], turn);
      REQUIRE(letter == static_cast<int>(2 * turn) + (rank == 0 ? 2 : 1));
      if (rank == 1) {
        ++letter;
        bells[0].ring();
      }
    }
  });
  REQUIRE(bells[0].sleepers == 0 && bells[1].sleepers == 0);
}

// The same with assistants that come, look, sleep or not, and leave. The letter is read as soon as it is known
// to have come.
void doorbell_assistants() {
  Doorbell bells[2] = {};
  int letter = 0;
  on_ranks(2, [&](int rank) {
    Doorbell& bell = bells[rank];
    for (std::uint32_t turn = 0; turn < 3000; ++turn) {
      const auto read = [&] { REQUIRE(letter == static_cast<int>(2 * turn) + (rank == 0 ? 2 : 1)); };
      if (rank == 0) {
        ++letter;
        bells[1].ring();
      }
      bell.begin_assistance();
      const std::chrono::microseconds spin(turn % 7);
      if (turn % 3 != 0 && bell.assist_once(turn, time_after(turn % 3 == 1 ? kLongS : 1e-5), spin) != turn) read();
      if (bell.end_assistance(turn) != turn) read();
      wait_for_ring(bell, turn);
      read();
      if (rank == 1) {
        ++letter;
        bells[0].ring();
      }
    }
  });
  REQUIRE(bells[0].assistants_asleep == 0 && bells[1].assistants_asleep == 0);
}

void doorbell_wakes_all() {
  for (int turn = 0; turn < 50; ++turn) {
    Doorbell bell = {};
    int letter = 0;
    on_ranks(4, [&](int rank) {
      if (rank == 0) {
        letter = turn;
        bell.ring();
      } else {
        wait_for_ring(bell, 0);
        REQUIRE(letter == turn);
      }
    });
  }
}

// Messages of several threads and heartbeats in between: each is whole, and those of one thread keep their order.
void heartbeat() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  constexpr int kMessages = 200, kLength = 300;
  {
    Heartbeat heart({ends[0]}, 1e-4, ".");
    on_ranks(3, [&](int rank) {
      for (int i = 0; rank < 2 && i < kMessages; ++i) {
        heart.send(0, std::string(kLength, rank == 0 ? 'a' : 'b') + std::string(1, static_cast<char>(i)));
      }
      int next[2] = {0, 0};
      while (rank == 2 && next[0] + next[1] < 2 * kMessages) {
        char message[kLength + 1];
        REQUIRE(recv(ends[1], message, 1, MSG_WAITALL) == 1);
        if (message[0] == '.') continue;
        REQUIRE(recv(ends[1], message + 1, kLength, MSG_WAITALL) == kLength);
        const int sender = message[0] - 'a';
        REQUIRE(std::all_of(message, message + kLength, [&](char letter) { return letter == message[0]; }));
        REQUIRE(message[kLength] == static_cast<char>(next[sender]++));
      }
    });
    heart.rest(0);
    heart.close(1.0);
    heart.send(0, "too late");
  }
  close(ends[0]);
  close(ends[1]);
}

// What arrives through sockets, and the rings of other threads, with bells that come and go.
void socket_bell() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  Doorbell bell = {};
  int letter = 0;
  for (std::uint32_t turn = 1; turn <= 300; ++turn) {
    SocketBell relay({ends[1]}, bell);
    on_ranks(3, [&](int rank) {
      char byte = 0;
      if (rank == 0) {
        letter = static_cast<int>(turn);
        REQUIRE(write(ends[0], &byte, 1) == 1);
      } else if (rank == 1) {
        bell.ring();
      } else {
        std::uint32_t seen = load<std::uint32_t>(address_of(&bell.count));
        while (recv(ends[1], &byte, 1, MSG_DONTWAIT) != 1) {
          bell.wait_once(seen, time_after(kLongS));
          seen = load<std::uint32_t>(address_of(&bell.count));
        }
        REQUIRE(letter == static_cast<int>(turn));
      }
    });
    if (turn % 2 == 0) relay.close();
  }
  REQUIRE(bell.sleepers == 0);
  close(ends[0]);
  close(ends[1]);
}

// The protocol of ByteStream in hvdlite/coordinator/control_page.py: bytes, then the head or tail that covers them.
void byte_stream() {
  constexpr std::uint64_t kBytes = 20000, kCapacity = 61;
  constexpr int kReaders = 2;
  std::vector<char> data(kCapacity);
  std::uint64_t positions[1 + kReaders] = {};
  const std::uintptr_t head = address_of(&positions[0]);
  const auto tail = [&](int reader) { return address_of(&positions[1 + reader]); };
  on_ranks(1 + kReaders, [&](int rank) {
    for (std::uint64_t at = 0; at < kBytes;) {
      if (rank == kReaders) {
        std::uint64_t slowest = at;
        for (int reader = 0; reader < kReaders; ++reader) {
          slowest = std::min(slowest, load<std::uint64_t>(tail(reader)));
        }
        for (; at < std::min(slowest + kCapacity, kBytes); ++at) data[at % kCapacity] = static_cast<char>(at % 101);
        store<std::uint64_t>(head, at);
      } else {
        for (const auto end = load<std::uint64_t>(head); at < end; ++at)
          REQUIRE(data[at % kCapacity] == char(at % 101));
        store<std::uint64_t>(tail(rank), at);
      }
      std::this_thread::yield();
    }
  });
}

// One after the other, each rank changing its copy as soon as it has its result.
void allreduce(int size) {
  constexpr std::uint64_t kMost = 1000;
  const Page page(size);
  std::vector<std::vector<float>> copies(size, std::vector<float>(kMost));
  std::vector<std::uintptr_t> addresses;
  for (const auto& copy : copies) addresses.push_back(address_of(copy.data()));
  on_ranks(size, [&](int rank) {
    Barrier barrier = page.barrier(rank, 5);
    for (int turn = 0; turn < 10; ++turn) {
      for (const std::uint64_t numel : {std::uint64_t{1}, std::uint64_t{17}, std::uint64_t{160}, kMost}) {
        for (std::uint64_t i = 0; i < numel; ++i) copies[rank][i] = value_of(rank, i);
        const WaitStatus status = barrier.allreduce(addresses, numel, DType::kFloat32, Op::kSum, 1.0, 2.0, kLongS);
        REQUIRE(status == WaitStatus::kOk);
        for (std::uint64_t i = 0; i < numel; ++i) REQUIRE(copies[rank][i] == 2 * sum_of(size, i));
      }
    }
  });
}

// One after the other, without meeting in between: with and without a cast, in place and not, of one tensor and of two,
// through narrow windows and through one that takes several blocks.
void staged(int size) {
  constexpr std::uint64_t kWindowBytes = 4096;
  const Page page(size);
  std::vector<std::vector<char>> windows(size, std::vector<char>(kStagingWindows * kWindowBytes));
  std::vector<std::uintptr_t> staging;
  for (const auto& window : windows) staging.push_back(address_of(window.data()));
  on_ranks(size, [&](int rank) {
    Barrier barrier = page.barrier(rank, 5);
    for (int turn = 0; turn < 120; ++turn) {
      const std::uint64_t numel = static_cast<std::uint64_t>(turn * 7);
      const DType wire = turn % 2 == 0 ? DType::kFloat32 : DType::kFloat16;
      std::vector<float> inputs(numel), results(numel);
      for (std::uint64_t i = 0; i < numel; ++i) inputs[i] = value_of(rank, i);
      std::vector<float>& outputs = turn % 3 == 0 ? inputs : results;
      const std::vector<std::uint64_t> offsets{0, turn % 5 == 0 ? numel : numel / 2};
      const std::vector<std::uint64_t> numels{offsets[1], numel - offsets[1]};
      const auto listed = [&](const std::vector<float>& tensors) {
        return TensorList({address_of(tensors.data()), address_of(tensors.data() + offsets[1])}, numels, offsets);
      };
      const TensorList from = listed(inputs), to = listed(outputs);
      const std::uint64_t window_numel = (turn % 4 == 1 ? kWindowBytes : 128) / item_bytes(wire);
      const TensorReduction job{from, to, numel, DType::kFloat32, wire, Op::kSum, 1.0, 1.0};
      REQUIRE(staged_allreduce(barrier, {job, staging, window_numel}, kLongS) == WaitStatus::kOk);
      for (std::uint64_t i = 0; i < numel; ++i) REQUIRE(outputs[i] == sum_of(size, i));
    }
  });
}

// One after the other, without meeting in between, of one tensor and of two; now and then somebody is late, and what
// some have begun is withdrawn.
void small(int size, int spin_us) {
  const Page page(size);
  const Lines lines(PlacesInTurn::bytes_needed(size));
  on_ranks(size, [&](int rank) {
    PlacesInTurn places(lines.address(), rank, size, page.abort_address(), spin_us);
    SmallAllreduce reduction(places);
    Barrier barrier = page.barrier(rank, 0);
    for (int turn = 0; turn < 300; ++turn) {
      const std::uint64_t numel =
          PlacesInTurn::most_bytes(size) / sizeof(float) * static_cast<std::uint64_t>(turn) / 299;
      const DType wire = turn % 2 == 0 ? DType::kFloat32 : DType::kFloat16;
      std::vector<float> inputs(numel), results(numel);
      for (std::uint64_t i = 0; i < numel; ++i) inputs[i] = value_of(rank, i);
      std::vector<float>& outputs = turn % 3 == 0 ? inputs : results;
      const std::uint64_t first = turn % 5 == 0 ? numel / 2 : numel;
      const auto listed = [&](const std::vector<float>& tensors) {
        return TensorList({address_of(tensors.data()), address_of(tensors.data() + first)}, {first, numel - first},
                          {0, first});
      };
      const TensorList from = listed(inputs), to = listed(outputs);
      const TensorReduction job{from, to, numel, DType::kFloat32, wire, Op::kSum, 1.0, 1.0};
      if (turn % 40 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (turn % 50 == 49) {
        if (rank > 0) reduction.begin(job);
        REQUIRE(barrier.wait(kLongS) == WaitStatus::kOk);
        places.withdraw();
      } else if (turn % 4 == 3) {
        reduction.begin(job);
      }
      REQUIRE(reduction.run(job, kLongS) == WaitStatus::kOk);
      for (std::uint64_t i = 0; i < numel; ++i) REQUIRE(outputs[i] == sum_of(size, i));
    }
    REQUIRE(places.late().empty());
  });
}

void small_without_a_rank() {
  constexpr int kSize = 3;
  const Page page(kSize);
  const Lines lines(PlacesInTurn::bytes_needed(kSize));
  float value = 0;
  on_ranks(kSize, [&](int rank) {
    float own = 1;
    const TensorList list({address_of(&own)}, {1}, {0});
    const TensorReduction job{list, list, 1, DType::kFloat32, DType::kFloat32, Op::kSum, 1.0, 1.0};
    PlacesInTurn places(lines.address(), rank, kSize, page.abort_address(), 0);
    SmallAllreduce reduction(places);
    REQUIRE(reduction.run(job, kLongS) == WaitStatus::kOk);
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      value = 1;
      store<std::uint32_t>(page.abort_address(), 1);
      places.wake_all();
    } else if (rank == 1) {
      REQUIRE(reduction.run(job, 0.05) == WaitStatus::kTimeout);
      REQUIRE(places.late().front() == 0);
    } else {
      REQUIRE(reduction.run(job, kLongS) == WaitStatus::kAborted);
      REQUIRE(value == 1);
    }
  });
}

// Each rank says that it is ready, and waits, asleep where others are late, until all are; whoever is rung for
// something else comes back later, as the coordinator would, and finds that all are ready.
void ready_counts(int spin_us) {
  constexpr int kSize = 3;
  const Page page(kSize);
  const Lines lines(kSize * kCacheLine), bells(kSize * kCacheLine);
  std::vector<std::uint64_t> turns(kSize);
  on_ranks(kSize, [&](int rank) {
    ReadyCounts counts(lines.address(), bells.address(), rank, kSize);
    Barrier barrier = page.barrier(rank, 0);
    Doorbell& bell = *reinterpret_cast<Doorbell*>(bells.address() + kCacheLine * rank);
    const std::chrono::microseconds spin(spin_us);
    for (std::uint64_t turn = 1; turn <= 600; ++turn) {
      if (turn % kSize == static_cast<std::uint64_t>(rank)) std::this_thread::sleep_for(std::chrono::microseconds(200));
      turns[rank] = turn;
      const std::uint32_t heard = bell.count.load();
      counts.want_ring(false);
      if (turn % 10 == 0 && rank == 1) reinterpret_cast<Doorbell*>(bells.address())->ring();
      counts.set(7, turn);
      auto outcome = counts.await(7, turn, heard, time_after(kLongS), spin);
      while (outcome == ReadyCounts::Outcome::kNotYet) {
        outcome = counts.await(7, turn, bell.count.load(), time_after(kLongS), spin);
      }
      for (const std::uint64_t theirs : turns) REQUIRE(theirs == turn);
      REQUIRE(barrier.wait(kLongS) == WaitStatus::kOk);
    }
    REQUIRE(counts.all(7) == 600);
    REQUIRE(counts.all(8) == 0);
  });
}

void deadline() {
  on_ranks(2, [](int rank) {
    for (int turn = 0; turn < 100; ++turn) {
      Deadline deadline(kLongS, "never seen", 3);
      if (turn % 2 == rank) deadline.cancel();
    }
  });
}

// Whether a race would be seen at all: the waiter does not acquire what the other rank released.
void race() {
  Word ready{0};
  int letter = 0;
  on_ranks(2, [&](int rank) {
    if (rank == 0) {
      letter = 1;
      ready.store(1, std::memory_order_release);
    } else {
      while (ready.load(std::memory_order_relaxed) == 0) std::this_thread::yield();
      REQUIRE(letter == 1);
    }
  });
}

const Cases kCases{
    {"barrier asleep", [] { barrier(0); }},
    {"barrier spinning", [] { barrier(1000); }},
    {"barrier timeout", barrier_timeout},
    {"barrier abort asleep", [] { barrier_abort(0); }},
    {"barrier abort spinning", [] { barrier_abort(10000); }},
    {"doorbell ping-pong", doorbell_ping_pong},
    {"doorbell assistants", doorbell_assistants},
    {"doorbell wakes all", doorbell_wakes_all},
    {"heartbeat", heartbeat},
    {"socket bell", socket_bell},
    {"byte stream", byte_stream},
    {"allreduce of 1", [] { allreduce(1); }},
    {"allreduce of 2", [] { allreduce(2); }},
    {"allreduce of 3", [] { allreduce(3); }},
    {"staged allreduce of 1", [] { staged(1); }},
    {"staged allreduce of 2", [] { staged(2); }},
    {"staged allreduce of 3", [] { staged(3); }},
    {"small allreduce of 1", [] { small(1, 5); }},
    {"small allreduce asleep", [] { small(3, 0); }},
    {"small allreduce spinning", [] { small(3, 1000); }},
    {"small allreduce without a rank", small_without_a_rank},
    {"ready counts asleep", [] { ready_counts(0); }},
    {"ready counts spinning", [] { ready_counts(1000); }},
    {"deadline", deadline},
    {"race", race},
};

}  // namespace

int main(int argc, char** argv) {
  Cases cases = kCases;
  cases.merge(across_nodes::cases());
  cases.merge(in_order::cases());
  cases.merge(of_plans::cases());
  if (argc == 2) {
    cases.at(argv[1])();
  } else {
    for (const auto& [name, work] : cases) std::puts(name.c_str());
  }
}
