#include "prepared_as_threads.h"

#include <chrono>
#include <deque>
#include <random>
#include <utility>

#include "pack.h"
#include "prepared_allreduce.h"
#include "ready_counts.h"
#include "small_allreduce.h"
#include "staged_allreduce.h"

namespace hvdlite {
namespace {

using Result = PreparedAllreduce::Result;

struct Operation {
  std::uint64_t numel;
  bool is_at_home;  // in memory that all ranks share, where results go as well
};

// A plan: small and large, at home and not.
constexpr Operation kPlan[] = {{100, false}, {9000, false}, {3000, true}, {10, true}};
constexpr std::uint64_t kPeriod = 4;
constexpr std::uint64_t kWindowNumel = 1024;
constexpr double kPatienceS = 2e-3;

// What the ranks share.
struct Node {
  explicit Node(int size)
      : page(size),
        agreement(size),
        small(SmallAllreduce::bytes_needed(size)),
        counts(size * kCacheLine),
        bells(size * kCacheLine),
        letters(2, std::vector<int>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      memory.push_back({std::vector<float>(kStagingWindows * kWindowNumel)});
      for (const Operation& operation : kPlan) memory.back().emplace_back(operation.numel);
    }
  }
  // Where operation `i` of the plan takes place, of all ranks: at home, or in windows.
  std::vector<std::uintptr_t> places(std::uint64_t i) const {
    std::vector<std::uintptr_t> found;
    for (const auto& own : memory) found.push_back(address_of(own[kPlan[i].is_at_home ? 1 + i : 0].data()));
    return found;
  }

  Page page, agreement;
  Lines small, counts, bells;
  std::vector<std::vector<std::vector<float>>> memory;  // of each rank: windows, then the homes of operations
  std::vector<std::vector<int>> letters;                // of each rank, of two turns
};

class Rank {
 public:
  Rank(Node& node, int rank, int size, int spin_us)
      : node_(node),
        rank_(rank),
        size_(size),
        barrier_(node.page.barrier(rank, spin_us)),
        agreement_(node.agreement.barrier(rank, 0)),
        small_(node.small.address(), rank, size, node.page.abort_address(), spin_us),
        counts_(node.counts.address(), node.bells.address(), rank, size) {
    for (std::uint64_t i = 0; i < kPeriod; ++i) {
      const auto [numel, is_at_home] = kPlan[i];
      AllreduceShape shape{
          {numel},  {0}, numel, node.places(i), is_at_home ? 0 : kWindowNumel, DType::kFloat32, DType::kFloat32,
          Op::kSum, 1.0, 2.0};
      calls_.emplace_back(barrier_, small_, counts_, std::move(shape), std::chrono::microseconds(spin_us), kPatienceS,
                          kLongS);
    }
  }

  // The next operation of the plan. Where others are late it is left to what the coordinator does.
  void operate(int turn) {
    begin(turn);
    const std::uint32_t heard = bell(rank_).count.load();
    if (turn % 10 == 0) bell((rank_ + 1) % size_).ring();
    const Result result = run(heard);
    if (result == Result::kNotYet) {
      while (counts_.await(plan_, count_, bell(rank_).count.load(), time_after(kLongS), std::chrono::microseconds(5)) ==
             ReadyCounts::Outcome::kNotYet) {
        continue;
      }
      check_letters(turn);
      execute();
    } else {
      REQUIRE(result == Result::kDone || result == Result::kDoneAndRung);
    }
    check(turn);
  }

  // The next operation, for which rank 0 does not come: all agree that the plan has ended before it, and do it all the
  // same.
  void end_the_plan(int turn) {
    begin(turn);
    if (rank_ != 0) REQUIRE(run(bell(rank_).count.load()) == Result::kNotYet);
    REQUIRE(agreement_.wait(kLongS) == WaitStatus::kOk);
    small_.withdraw();
    execute();
    check(turn);
    ++plan_;
    count_ = 0;
  }

 private:
  void begin(int turn) {
    const std::uint64_t i = count_++ % kPeriod;
    inputs_.resize(kPlan[i].numel);
    results_.assign(kPlan[i].numel, 0);
    from_ = kPlan[i].is_at_home ? node_.memory[rank_][1 + i].data() : inputs_.data();
    to_ = kPlan[i].is_at_home || turn % 3 == 0 ? from_ : results_.data();
    for (std::uint64_t k = 0; k < kPlan[i].numel; ++k) from_[k] = value_of(rank_, k + turn);
    node_.letters[turn % 2][rank_] = turn;
  }

  Result run(std::uint32_t heard) {
    const Result result = call().run({address_of(from_)}, {address_of(to_)}, plan_, count_, heard);
    REQUIRE(call().last().result == result && call().last().count == count_ && call().last().plan == plan_);
    return result;
  }

  // As the coordinator's backend does it.
  void execute() {
    const std::uint64_t i = (count_ - 1) % kPeriod, numel = kPlan[i].numel, bytes = numel * sizeof(float);
    const TensorList from({address_of(from_)}, {numel}, {0}), to({address_of(to_)}, {numel}, {0});
    const TensorReduction job{from, to, numel, DType::kFloat32, DType::kFloat32, Op::kSum, 1.0, 2.0};
    WaitStatus status;
    if (bytes <= (kPlan[i].is_at_home ? SmallAllreduce::kMostBytesAtHome : small_.most_bytes())) {
      status = small_.run(job, kLongS);
    } else if (kPlan[i].is_at_home) {
      status = barrier_.allreduce(node_.places(i), numel, DType::kFloat32, Op::kSum, 1.0, 2.0, kLongS);
    } else {
      status = staged_allreduce(barrier_, {job, node_.places(i), kWindowNumel}, kLongS);
    }
    REQUIRE(status == WaitStatus::kOk);
  }

  void check(int turn) const {
    const std::uint64_t numel = kPlan[(count_ - 1) % kPeriod].numel;
    for (std::uint64_t k = 0; k < numel; ++k) REQUIRE(to_[k] == 2 * sum_of(size_, k + turn));
    check_letters(turn);
  }

  // What a rank has written before it said that it is ready, all have seen who know of that.
  void check_letters(int turn) const {
    for (const int letter : node_.letters[turn % 2]) REQUIRE(letter == turn);
  }

  Doorbell& bell(int rank) const {
    return *reinterpret_cast<Doorbell*>(node_.bells.address() + kCacheLine * static_cast<std::uintptr_t>(rank));
  }
  PreparedAllreduce& call() { return calls_[(count_ - 1) % kPeriod]; }

  Node& node_;
  int rank_;
  int size_;
  Barrier barrier_, agreement_;
  SmallAllreduce small_;
  ReadyCounts counts_;
  std::deque<PreparedAllreduce> calls_;
  std::uint64_t plan_ = 1;
  std::uint64_t count_ = 0;  // of operations that were begun in it
  std::vector<float> inputs_, results_;
  float* from_ = nullptr;  // of the operation that was begun last
  float* to_ = nullptr;
};

// Now and then somebody is late, or rung, or a plan ends before what others have begun of it.
void prepared(int size, int spin_us) {
  Node node(size);
  on_ranks(size, [&](int rank) {
    Rank own(node, rank, size, spin_us);
    std::mt19937 draw(1);  // the same on all ranks
    for (int turn = 1; turn <= 400; ++turn) {
      if (turn % 25 == rank) std::this_thread::sleep_for(std::chrono::duration<double>(2 * kPatienceS));
      if (draw() % 16 == 0 && size > 1) {
        own.end_the_plan(turn);
      } else {
        own.operate(turn);
      }
    }
  });
}

// Plans that end as all ranks want the next; some want another, or wait for nobody. What ranks have written before is
// seen by all that agree. Only where they do not is there anything else that orders them.
void changes(int size, int spin_us) {
  Page page(size);
  Lines counts(size * kCacheLine), bells(size * kCacheLine);
  std::vector<std::vector<int>> letters(2, std::vector<int>(size));
  on_ranks(size, [&](int rank) {
    ReadyCounts own(counts.address(), bells.address(), rank, size);
    Barrier barrier = page.barrier(rank, 0);
    const auto& bell = *reinterpret_cast<Doorbell*>(bells.address() + kCacheLine * static_cast<std::uintptr_t>(rank));
    for (int plan = 1; plan <= 400; ++plan) {
      letters[plan % 2][rank] = plan;
      own.set(plan, 3);
      const std::uint64_t next = plan % 7 == 0 && rank == 0 ? 1 : 2;
      const auto until = time_after(plan % 11 == rank ? 0 : kLongS);
      if (own.agree(plan, next, bell.count.load(), until, std::chrono::microseconds(spin_us))) {
        REQUIRE(size == 1 || plan % 7 != 0);
        for (const int letter : letters[plan % 2]) REQUIRE(letter == plan);
      } else {
        REQUIRE(barrier.wait(kLongS) == WaitStatus::kOk);
      }
    }
  });
}

}  // namespace

Cases cases_of_plans() {
  return {
      {"changes of 1", [] { changes(1, 5); }},
      {"changes of 2 asleep", [] { changes(2, 0); }},
      {"changes of 2 spinning", [] { changes(2, 1000); }},
      {"changes of 3 asleep", [] { changes(3, 0); }},
      {"changes of 3 spinning", [] { changes(3, 1000); }},
      {"prepared allreduces of 1", [] { prepared(1, 5); }},
      {"prepared allreduces of 2 asleep", [] { prepared(2, 0); }},
      {"prepared allreduces of 2 spinning", [] { prepared(2, 1000); }},
      {"prepared allreduces of 3 asleep", [] { prepared(3, 0); }},
      {"prepared allreduces of 3 spinning", [] { prepared(3, 1000); }},
  };
}

}  // namespace hvdlite
