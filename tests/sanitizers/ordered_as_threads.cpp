#include "ordered_as_threads.h"

#include <atomic>
#include <chrono>
#include <deque>

#include "node/ordered_exchange.h"

namespace hvdlite::in_order {
namespace {

using Result = OrderedExchange::Result;
using Part = OrderedExchange::Part;

constexpr std::uint64_t kWindowBytes = 1024;
constexpr std::uint64_t kStreamedBytes = 2000;

// What the ranks share, and each has of its own.
struct Node {
  Node(int size, int spin_us) : page(size), lines(OrderedExchange::bytes_needed(size, kWindowBytes)) {
    for (int rank = 0; rank < size; ++rank) {
      exchanges.emplace_back(lines.address(), rank, size, page.abort_address(), spin_us, kWindowBytes, kStreamedBytes);
    }
  }
  Page page;
  Lines lines;
  std::deque<OrderedExchange> exchanges;
};

// Of what `sender` has for `receiver`, which may be nothing, or many pieces.
std::size_t bytes_of(int turn, int sender, int receiver) {
  return static_cast<std::size_t>(turn * 37 + sender * 101 + receiver * 53) % 1500;
}

char byte_of(int turn, int sender, int receiver, std::size_t i) {
  return static_cast<char>((static_cast<std::size_t>(turn + sender * 31 + receiver * 7) + i) % 127);
}

// Tensors that are sent or arrive, and where they are.
struct Parts {
  explicit Parts(const std::vector<std::size_t>& sizes) {
    for (const std::size_t bytes : sizes) tensors.emplace_back(bytes);
    for (const auto& tensor : tensors) places.emplace_back(address_of(tensor.data()), tensor.size());
  }
  std::vector<std::vector<char>> tensors;
  std::vector<Part> places;
};

// Of one rank: calls, whose results are checked. A call that has timed out is made again.
class Caller {
 public:
  Caller(OrderedExchange& exchange, int rank, int size) : exchange_(exchange), rank_(rank), size_(size) {}

  void alltoall(int turn) {
    std::vector<std::size_t> sent, taken;
    for (int rank = 0; rank < size_; ++rank) {
      sent.push_back(bytes_of(turn, rank_, rank));
      taken.push_back(bytes_of(turn, rank, rank_));
    }
    Parts departures(sent), arrivals(taken);
    for (int rank = 0; rank < size_; ++rank) fill(departures.tensors[rank], turn, rank_, rank);
    REQUIRE(until_done(turn, [&](double timeout_s) {
              return exchange_.alltoall(1, departures.places, arrivals.places, timeout_s);
            }) == Result::kOk);
    for (int rank = 0; rank < size_; ++rank) check(arrivals.tensors[rank], turn, rank, rank_);
  }

  void spread(int turn) {
    std::vector<std::size_t> taken;
    for (int rank = 0; rank < size_; ++rank) taken.push_back(bytes_of(turn, rank, 0));
    std::vector<char> own(taken[rank_]);
    Parts arrivals(taken);
    fill(own, turn, rank_, 0);
    const Part departure{address_of(own.data()), own.size()};
    REQUIRE(until_done(turn, [&](double timeout_s) {
              return exchange_.spread(2, departure, arrivals.places, timeout_s);
            }) == Result::kOk);
    for (int rank = 0; rank < size_; ++rank) check(arrivals.tensors[rank], turn, rank, 0);
  }

  // Another root each time; what is sent lies in two tensors, of which other ranks do not want the first now and then.
  void broadcast(int turn) {
    const int root = turn / 5 % size_;
    const std::size_t bytes[] = {bytes_of(turn, root, 0), bytes_of(turn, root, 1)};
    Parts tensors({bytes[0], bytes[1]});
    if (rank_ == root) {
      for (int i = 0; i < 2; ++i) fill(tensors.tensors[i], turn, root, i);
    }
    const bool is_unwanted = rank_ != root && turn % 10 == 3;
    const std::uint64_t second = (bytes[0] + 63) / 64 * 64;
    const TensorList list({is_unwanted ? 0 : tensors.places[0].first, tensors.places[1].first}, {bytes[0], bytes[1]},
                          {0, second});
    REQUIRE(until_done(turn, [&](double timeout_s) {
              return exchange_.broadcast(6, list, second + bytes[1], root, timeout_s);
            }) == Result::kOk);
    for (int i = is_unwanted ? 1 : 0; i < 2; ++i) check(tensors.tensors[i], turn, root, i);
  }

  // Parts of several lengths; the last rank gives zeros that nobody stored, and wants nothing, now and then.
  void reduce_scatter(int turn) {
    const bool one_is_absent = turn % 20 == 2 && size_ > 1;
    const bool is_absent = one_is_absent && rank_ == size_ - 1;
    std::vector<std::uint64_t> numels;
    for (int rank = 0; rank < size_; ++rank) numels.push_back(static_cast<std::uint64_t>(turn * 3 + rank * 40));
    std::vector<std::vector<float>> inputs;
    std::vector<std::uintptr_t> places;
    for (int rank = 0; rank < size_; ++rank) {
      inputs.emplace_back(numels[rank]);
      for (std::size_t i = 0; i < numels[rank]; ++i) inputs[rank][i] = value_of(rank_, i + rank);
      places.push_back(is_absent ? 0 : address_of(inputs[rank].data()));
    }
    const std::size_t numel = numels[rank_];
    std::vector<float> output(numel);
    const Reducer reducer(DType::kFloat32, Op::kSum, 1.0, 1.0);
    REQUIRE(until_done(turn, [&](double timeout_s) {
              return exchange_.reduce_scatter(3, places, numels, is_absent ? 0 : address_of(output.data()),
                                              DType::kFloat32, reducer, timeout_s);
            }) == Result::kOk);
    const int givers = one_is_absent ? size_ - 1 : size_;
    for (std::size_t i = 0; i < numel; ++i) REQUIRE(output[i] == (is_absent ? 0 : sum_of(givers, i + rank_)));
  }

  // What a rank writes before it comes, all see; it may write again when it has come twice.
  void meet(int turn, std::vector<int>& letters) {
    int* now = letters.data() + turn / 4 % 2 * size_;
    now[rank_] = turn;
    REQUIRE(until_done(turn, [&](double timeout_s) { return exchange_.meet(4, timeout_s); }) == Result::kOk);
    for (int rank = 0; rank < size_; ++rank) REQUIRE(now[rank] == turn);
  }

  // Rank 0 comes for something else, or expects too much: all find out, and nothing is done.
  void contradict(int turn) {
    const std::uint64_t card = turn % 3 == 0 && rank_ == 0 ? 5 : 4;
    const std::size_t expected = rank_ == 0 ? 2000 : 1;
    Parts departures(std::vector<std::size_t>(size_, 1)), arrivals(std::vector<std::size_t>(size_, expected));
    const auto call = [&](double timeout_s) {
      return turn % 3 == 0 ? exchange_.meet(card, timeout_s)
                           : exchange_.alltoall(1, departures.places, arrivals.places, timeout_s);
    };
    REQUIRE(until_done(turn, call) == Result::kContradiction);
  }

 private:
  template <class Call>
  Result until_done(int turn, Call call) {
    Result result = call(turn % 5 == 0 ? 0.0 : kLongS);
    while (result == Result::kTimeout) result = call(turn % 2 == 0 ? 1e-4 : kLongS);
    return result;
  }

  static void fill(std::vector<char>& tensor, int turn, int sender, int receiver) {
    for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = byte_of(turn, sender, receiver, i);
  }

  static void check(const std::vector<char>& tensor, int turn, int sender, int receiver) {
    for (std::size_t i = 0; i < tensor.size(); ++i) REQUIRE(tensor[i] == byte_of(turn, sender, receiver, i));
  }

  OrderedExchange& exchange_;
  int rank_;
  int size_;
};

// One after the other, without meeting in between; now and then somebody is late. Another thread asks who is.
void ordered(int size, int spin_us) {
  Node node(size, spin_us);
  std::vector<int> letters(2 * size);
  std::atomic<int> at_work{size};
  on_ranks(size + 1, [&](int rank) {
    if (rank == size) {
      for (; at_work != 0; std::this_thread::yield()) node.exchanges[0].late();
      return;
    }
    Caller caller(node.exchanges[rank], rank, size);
    for (int turn = 0; turn < 400; ++turn) {
      if (turn % 30 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (turn % 4 == 0) caller.alltoall(turn);
      if (turn % 4 == 1) caller.spread(turn);
      if (turn % 4 == 2) caller.reduce_scatter(turn);
      if (turn % 4 == 3) caller.meet(turn, letters);
      if (turn % 5 == 3) caller.broadcast(turn);
      if (turn % 20 == 7 && size > 1) caller.contradict(turn);
    }
    REQUIRE(node.exchanges[rank].late().empty());
    --at_work;
  });
}

// Rank 0 does not come, and says what it says before.
void ordered_without_a_rank(bool leaves) {
  constexpr int kSize = 3;
  Node node(kSize, 0);
  int reason = 0;
  on_ranks(kSize, [&](int rank) {
    OrderedExchange& exchange = node.exchanges[rank];
    REQUIRE(exchange.meet(4, kLongS) == Result::kOk);
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      reason = 1;
      if (leaves) {
        exchange.leave();
      } else {
        store<std::uint32_t>(node.page.abort_address(), 1);
        exchange.wake_all();
      }
      return;
    }
    Result result = exchange.meet(4, rank == 1 ? 0.01 : kLongS);
    if (rank == 1) {
      REQUIRE(result == Result::kTimeout);
      REQUIRE(exchange.late().front() == 0);
      result = exchange.meet(4, kLongS);
    }
    REQUIRE(result == (leaves ? Result::kDeparted : Result::kAborted));
    REQUIRE(exchange.departed() == std::vector<int>(leaves ? 1 : 0, 0));
    REQUIRE(reason == 1);
  });
}

}  // namespace

Cases cases() {
  return {
      {"ordered calls of 1", [] { ordered(1, 5); }},
      {"ordered calls asleep", [] { ordered(3, 0); }},
      {"ordered calls spinning", [] { ordered(3, 1000); }},
      {"ordered calls and a rank that aborts", [] { ordered_without_a_rank(false); }},
      {"ordered calls and a rank that leaves", [] { ordered_without_a_rank(true); }},
  };
}

}  // namespace hvdlite::in_order
