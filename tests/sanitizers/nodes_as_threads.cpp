// Messages between leaders of nodes, by an MPI that is a list, and what the ranks of a node do in shared memory
// meanwhile.
#include "nodes_as_threads.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "messages/bound_messages.h"
#include "messages/early_allreduce.h"
#include "messages/early_turns.h"
#include "node/ready_counts.h"

namespace hvdlite::across_nodes {
namespace {

// Messages on their way, by source and target; and what the functions below return.
struct Network {
  std::mutex lock;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> messages;
  int start_error = 0;
  int test_error = 0;
};

struct Request {
  Network& network;
  std::pair<int, int> way;
  bool sends;
  std::uintptr_t address;
  std::size_t bytes;
  bool is_active = false;
};

int start(void* given) {
  auto& request = *static_cast<Request*>(given);
  REQUIRE(!request.is_active);
  request.is_active = true;
  if (request.sends) {
    const auto* data = reinterpret_cast<const char*>(request.address);
    const std::lock_guard<std::mutex> guard(request.network.lock);
    request.network.messages[request.way].emplace_back(data, data + request.bytes);
  }
  return request.network.start_error;
}

int test(void* given, int* is_done, void*) {
  auto& request = *static_cast<Request*>(given);
  *is_done = 1;
  if (request.network.test_error != 0 || !request.is_active) return request.network.test_error;
  if (!request.sends) {
    const std::lock_guard<std::mutex> guard(request.network.lock);
    auto& messages = request.network.messages[request.way];
    *is_done = messages.empty() ? 0 : 1;
    if (messages.empty()) return 0;
    REQUIRE(messages.front().size() == request.bytes);
    std::memcpy(reinterpret_cast<void*>(request.address), messages.front().data(), request.bytes);
    messages.pop_front();
  }
  request.is_active = false;
  return 0;
}

// Recursive doubling between a power of two of nodes.
class Doubling {
 public:
  Doubling(Network& network, int node, int nodes, std::uintptr_t place, std::uint64_t numel, DType dtype) {
    const std::size_t bytes = numel * item_bytes(dtype);
    std::vector<BoundMessages::Phase> phases;
    for (int distance = 1; distance < nodes; distance *= 2) {
      const int peer = node ^ distance;
      scratch_.emplace_back(bytes);
      const std::uintptr_t arrived = address_of(scratch_.back().data());
      requests_.push_back(Request{network, {peer, node}, false, arrived, bytes});
      const std::uintptr_t receive = address_of(&requests_.back());
      requests_.push_back(Request{network, {node, peer}, true, place, bytes});
      const std::uintptr_t send = address_of(&requests_.back());
      phases.push_back({{receive, send},
                        {{receive, peer}, {send, peer}},
                        {{{place}, {place, arrived}, numel, Reducer(dtype, Op::kSum, 1.0, 1.0)}}});
    }
    messages_ = std::make_shared<BoundMessages>(MpiFunctions{start, test}, std::move(phases));
  }

  const std::shared_ptr<BoundMessages>& messages() const { return messages_; }

 private:
  std::deque<Request> requests_;  // stay where they are
  std::deque<std::vector<char>> scratch_;
  std::shared_ptr<BoundMessages> messages_;
};

constexpr std::uint64_t kNumel = 100;

// Of one node: what its ranks share.
struct Node {
  explicit Node(int size)
      : counts(size * kCacheLine),
        bells(size * kCacheLine),
        turns(EarlyTurns::bytes_needed(size)),
        memory(size, std::vector<float>(kNumel)) {
    for (const auto& copy : memory) places.push_back(address_of(copy.data()));
  }
  Doorbell& bell(int rank) const { return *reinterpret_cast<Doorbell*>(bells.address() + kCacheLine * rank); }

  Lines counts, bells, turns;
  std::vector<std::vector<float>> memory;
  std::vector<std::uintptr_t> places;
};

void bring_to_its_end(EarlyAllreduce::Progress progress, EarlyTurns& turns, const EarlyShape& shape,
                      BoundMessages& messages) {
  using Progress = EarlyAllreduce::Progress;
  while (progress != Progress::kDone) {
    std::this_thread::yield();
    if (shape.rank != 0) {
      if (turns.has_come()) return;
    } else if (progress == Progress::kWaiting) {
      progress = static_cast<Progress>(messages.advance());
    } else if (turns.all_have_begun()) {
      REQUIRE(progress == Progress::kNodeIsLate);
      if (shape.in_node) shape.in_node->reduce({shape.places.front()}, shape.places, 0, shape.numel);
      progress = static_cast<Progress>(messages.start());
    }
  }
  const std::size_t bytes = shape.numel * item_bytes(shape.wire_dtype);
  for (const std::uintptr_t place : shape.places) {
    if (place == shape.places.front()) continue;
    std::memcpy(reinterpret_cast<void*>(place), reinterpret_cast<const void*>(shape.places.front()), bytes);
  }
  turns.bring();
}

// One after the other, of two types in turns. Some ranks are late, or rung, so that others leave the call, and bring
// what they have begun to its end as Python would.
void early(const std::vector<int>& sizes) {
  const int ranks = std::accumulate(sizes.begin(), sizes.end(), 0);
  const bool is_split = *std::max_element(sizes.begin(), sizes.end()) > 1;
  std::deque<Node> nodes;
  std::vector<std::pair<int, int>> homes;  // node and rank there, of each rank
  for (const int size : sizes) {
    for (int rank = 0; rank < size; ++rank) homes.emplace_back(static_cast<int>(nodes.size()), rank);
    nodes.emplace_back(size);
  }
  Network network;
  on_ranks(ranks, [&](int rank) {
    const auto [home, local_rank] = homes[rank];
    Node& node = nodes[home];
    ReadyCounts counts(node.counts.address(), node.bells.address(), local_rank, sizes[home]);
    EarlyTurns turns(counts, node.turns.address());
    PoliteLook look(std::chrono::microseconds(100), std::chrono::microseconds(1000), std::chrono::microseconds(0));
    std::vector<EarlyShape> shapes;
    std::deque<Doubling> doublings;
    std::deque<EarlyAllreduce> natives;
    for (const DType wire : {DType::kFloat32, DType::kFloat16}) {
      const auto place_rank = static_cast<std::uint32_t>(local_rank);
      shapes.push_back({{kNumel}, {0}, kNumel, node.places, place_rank, DType::kFloat32, wire, {}});
      if (is_split) shapes.back().in_node.emplace(wire, Op::kSum, 1.0, 1.0);
      doublings.emplace_back(network, home, static_cast<int>(sizes.size()), node.places.front(), kNumel, wire);
      natives.emplace_back(counts, turns, look, shapes.back(), std::chrono::microseconds(5), kLongS);
      natives.back().bind(doublings.back().messages());
    }
    Doorbell& bell = node.bell(local_rank);
    for (std::uint64_t turn = 1; turn <= 200; ++turn) {
      const std::size_t which = turn % 2;
      std::vector<float> values(kNumel), results(kNumel);
      for (std::uint64_t i = 0; i < kNumel; ++i) values[i] = static_cast<float>((i + turn) % 7) + rank;
      if (turn % 30 == static_cast<std::uint64_t>(rank)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const std::uint32_t heard = bell.count.load();
      if (turn % 10 == 0) bell.ring();
      EarlyAllreduce& native = natives[which];
      const auto run = [&](std::uint32_t followed) {
        return native.run({address_of(values.data())}, {address_of(results.data())}, 1, turn, followed);
      };
      if (turn % 40 == static_cast<std::uint64_t>(rank)) {  // others of the node begin, and see that this one has not
        counts.set(1, turn);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      auto result = run(heard);
      while (result == DirectCall::Result::kNotYet) result = run(bell.count.load());
      if (result == DirectCall::Result::kBegun) {
        bring_to_its_end(native.progress(), turns, shapes[which], *doublings[which].messages());
        const TensorList outputs({address_of(results.data())}, {kNumel}, {0});
        outputs.unpack(node.places[local_rank], 0, kNumel, shapes[which].wire_dtype, DType::kFloat32, 1.0);
      }
      for (std::uint64_t i = 0; i < kNumel; ++i) {
        REQUIRE(results[i] == static_cast<float>(ranks * ((i + turn) % 7) + ranks * (ranks - 1) / 2));
      }
    }
  });
  for (const auto& [way, messages] : network.messages) REQUIRE(messages.empty());
}

// MPI fails where a message starts, or where it is waited for.
void messages_fail() {
  for (const bool at_start : {true, false}) {
    Network network;
    (at_start ? network.start_error : network.test_error) = 17;
    float value = 1;
    Doubling doubling(network, 0, 2, address_of(&value), 1, DType::kFloat32);
    BoundMessages& messages = *doubling.messages();
    REQUIRE(messages.start() == BoundMessages::Progress::kFailed);
    REQUIRE(messages.error() == 17);
  }
}

}  // namespace

Cases cases() {
  return {
      {"early allreduce of 2 nodes", [] { early({1, 1}); }},
      {"early allreduce of 4 nodes", [] { early({1, 1, 1, 1}); }},
      {"early allreduce of 2 x 2", [] { early({2, 2}); }},
      {"early allreduce of 3 and 1", [] { early({3, 1}); }},
      {"messages fail", messages_fail},
  };
}

}  // namespace hvdlite::across_nodes
