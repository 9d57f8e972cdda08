#include "prepared_as_threads.h"

#include <chrono>
#include <memory>
#include <random>
#include <utility>

#include "kernels/pack.h"
#include "node/ordered_exchange.h"
#include "node/places_in_turn.h"
#include "node/ready_counts.h"
#include "node/small_allreduce.h"
#include "node/small_gather.h"
#include "node/staged_allreduce.h"
#include "prepared/prepared_allreduce.h"
#include "prepared/prepared_gather.h"
#include "prepared/prepared_reduce_scatter.h"

namespace hvdlite::of_plans {
namespace {

using Result = DirectCall::Result;

enum class Kind { kAllreduce, kReduceScatter, kGather, kBarrier };

struct Operation {
  Kind kind;
  std::uint64_t numel;  // of a gather the most that a rank gives
  bool is_at_home;      // in memory that all ranks share, where results go as well
};

// A plan: small and large, at home and not.
constexpr Operation kPlan[] = {{Kind::kAllreduce, 100, false},  {Kind::kGather, 20, false},
                               {Kind::kAllreduce, 9000, false}, {Kind::kReduceScatter, 50, false},
                               {Kind::kAllreduce, 3000, true},  {Kind::kBarrier, 0, false},
                               {Kind::kAllreduce, 10, true}};
constexpr std::uint64_t kPeriod = 7;
constexpr std::uint64_t kWindowNumel = 1024;
constexpr std::uint64_t kWindowBytes = 4096;
constexpr std::uint64_t kCard = 7;
constexpr double kPatienceS = 2e-3;

// What the ranks share.
struct Node {
  explicit Node(int size)
      : page(size),
        agreement(size),
        small(PlacesInTurn::bytes_needed(size)),
        windows(OrderedExchange::bytes_needed(size, kWindowBytes)),
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
  Lines small, windows, counts, bells;
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
        places_(node.small.address(), rank, size, node.page.abort_address(), spin_us),
        small_(places_),
        gather_(places_),
        exchange_(node.windows.address(), rank, size, node.page.abort_address(), spin_us, kWindowBytes, 1 << 20),
        counts_(node.counts.address(), node.bells.address(), rank, size) {
    const Patience patience{std::chrono::microseconds(spin_us), kPatienceS, kLongS};
    for (std::uint64_t i = 0; i < kPeriod; ++i) calls_.push_back(prepared(i, patience));
    more_rows_ = prepared_gather(rows(5), patience);
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
      check_letters();
      execute();
    } else if (result == Result::kBegun) {
      REQUIRE(operation().kind == Kind::kGather);
      execute();
    } else {
      REQUIRE(result == Result::kDone || result == Result::kDoneAndRung);
    }
    check();
  }

  // The next operation, for which rank 0 does not come: all agree that the plan has ended before it, and do it all the
  // same.
  void end_the_plan(int turn) {
    begin(turn);
    if (rank_ != 0) REQUIRE(run(bell(rank_).count.load()) == Result::kNotYet);
    REQUIRE(agreement_.wait(kLongS) == WaitStatus::kOk);
    places_.withdraw();
    execute();
    check();
    ++plan_;
    count_ = 0;
  }

 private:
  std::unique_ptr<PreparedInNode> prepared(std::uint64_t i, const Patience& patience) {
    const auto [kind, numel, is_at_home] = kPlan[i];
    const DType dtype = DType::kFloat32;
    if (kind == Kind::kBarrier) return std::make_unique<PreparedBarrier>(counts_, patience);
    if (kind == Kind::kGather) return prepared_gather(rows(1), patience);
    if (kind == Kind::kReduceScatter) {
      ReduceScatterShape shape{parts(numel), dtype, dtype, Op::kSum, 1.0, 2.0};
      return std::make_unique<PreparedReduceScatter>(small_, Windows{exchange_, kCard}, counts_, std::move(shape),
                                                     patience);
    }
    const std::uint64_t window = is_at_home ? 0 : kWindowNumel;
    AllreduceShape shape{{numel}, {0}, numel, node_.places(i), window, dtype, dtype, Op::kSum, 1.0, 2.0};
    return std::make_unique<PreparedAllreduce>(barrier_, small_, counts_, std::move(shape), patience);
  }

  std::unique_ptr<PreparedInNode> prepared_gather(std::uint64_t given, const Patience& patience) {
    GatherShape shape{{static_cast<std::int64_t>(given)}, 0, sizeof(float), false};
    return std::make_unique<PreparedGather>(gather_, Windows{exchange_, kCard}, counts_, std::move(shape), patience);
  }

  // Given to a gather, by `rank`. Every fifth turn the first rank gives more, so that others expect something else.
  static std::uint64_t rows_of(int rank, int turn) { return 3 + rank + (rank == 0 && turn % 5 == 0 ? 8 : 0); }
  std::uint64_t rows(int turn) const { return rows_of(rank_, turn); }

  // Of a reduce-scatter.
  SmallAllreduce::Part wanted(std::uint64_t numel) const {
    return {numel * rank_ / size_, numel * (rank_ + 1) / size_};
  }

  std::vector<std::uint64_t> parts(std::uint64_t numel) const {
    std::vector<std::uint64_t> numels;
    for (int rank = 0; rank < size_; ++rank) numels.push_back(numel * (rank + 1) / size_ - numel * rank / size_);
    return numels;
  }

  void begin(int turn) {
    turn_ = turn;
    const std::uint64_t i = count_++ % kPeriod;
    inputs_.resize(kPlan[i].numel);
    results_.assign(kPlan[i].numel * (kPlan[i].kind == Kind::kGather ? size_ : 1), 0);
    const bool is_allreduce = kPlan[i].kind == Kind::kAllreduce;
    from_ = kPlan[i].is_at_home ? node_.memory[rank_][1 + i].data() : inputs_.data();
    to_ = kPlan[i].is_at_home || (is_allreduce && turn % 3 == 0) ? from_ : results_.data();
    for (std::uint64_t k = 0; k < kPlan[i].numel; ++k) from_[k] = value_of(rank_, k + turn);
    node_.letters[turn % 2][rank_] = turn;
  }

  Result run(std::uint32_t heard) {
    SplitPhaseCall* const phases = (turn_ + rank_) % 3 == 0 ? call().split_phase() : nullptr;
    Result result = Result::kNotYet;
    if (phases == nullptr) {
      result = call().run({address_of(from_)}, {address_of(to_)}, plan_, count_, heard);
    } else {
      phases->start({address_of(from_)}, {address_of(to_)}, plan_, count_);
      if (turn_ % 2 == 0) result = phases->complete_now();
      if (result == Result::kNotYet) result = phases->complete(heard);
    }
    REQUIRE(call().last().result == result && call().last().count == count_ && call().last().plan == plan_);
    return result;
  }

  // As the coordinator's backend does it.
  void execute() {
    const auto [kind, numel, is_at_home] = operation();
    if (kind == Kind::kBarrier) return;
    if (kind == Kind::kGather) return execute_gather();
    const std::uint64_t bytes = numel * sizeof(float);
    const SmallAllreduce::Part part = kind == Kind::kReduceScatter ? wanted(numel) : SmallAllreduce::Part{0, numel};
    const TensorList from({address_of(from_)}, {numel}, {0});
    const TensorList to({address_of(to_)}, {part.end - part.begin}, {part.begin});
    const TensorReduction job{from, to, numel, DType::kFloat32, DType::kFloat32, Op::kSum, 1.0, 2.0};
    WaitStatus status;
    if (bytes <= (is_at_home ? SmallAllreduce::kMostBytesAtHome : small_.most_bytes())) {
      status = small_.run(job, part, kLongS);
    } else if (is_at_home) {
      status = barrier_.allreduce(places(), numel, DType::kFloat32, Op::kSum, 1.0, 2.0, kLongS);
    } else {
      status = staged_allreduce(barrier_, {job, places(), kWindowNumel}, kLongS);
    }
    REQUIRE(status == WaitStatus::kOk);
  }

  void execute_gather() {
    const std::uint64_t given = rows(turn_);
    const std::vector<SmallGather::Piece> pieces{{address_of(from_), given * sizeof(float)}};
    REQUIRE(gather_.run({static_cast<std::int64_t>(given)}, pieces, kLongS) == WaitStatus::kOk);
    std::vector<SmallGather::Part> parts;
    for (int rank = 0; rank < size_; ++rank) parts.emplace_back(0, *gather_.numbers(rank) * sizeof(float));
    gather_.read(address_of(to_), parts);
  }

  void check() const {
    const auto [kind, numel, is_at_home] = operation();
    if (kind == Kind::kGather) {
      const float* at = to_;
      for (int rank = 0; rank < size_; ++rank) {
        for (std::uint64_t k = 0; k < rows_of(rank, turn_); ++k) REQUIRE(*at++ == value_of(rank, k + turn_));
      }
    } else {
      const SmallAllreduce::Part part = kind == Kind::kReduceScatter ? wanted(numel) : SmallAllreduce::Part{0, numel};
      for (std::uint64_t k = part.begin; k < part.end; ++k)
        REQUIRE(to_[k - part.begin] == 2 * sum_of(size_, k + turn_));
    }
    check_letters();
  }

  // What a rank has written before it said that it is ready, all have seen who know of that.
  void check_letters() const {
    for (const int letter : node_.letters[turn_ % 2]) REQUIRE(letter == turn_);
  }

  Doorbell& bell(int rank) const {
    return *reinterpret_cast<Doorbell*>(node_.bells.address() + kCacheLine * static_cast<std::uintptr_t>(rank));
  }
  const Operation& operation() const { return kPlan[(count_ - 1) % kPeriod]; }
  std::vector<std::uintptr_t> places() const { return node_.places((count_ - 1) % kPeriod); }
  PreparedInNode& call() {
    const bool gives_more = operation().kind == Kind::kGather && rows(turn_) != rows(1);
    return gives_more ? *more_rows_ : *calls_[(count_ - 1) % kPeriod];
  }

  Node& node_;
  int rank_;
  int size_;
  Barrier barrier_, agreement_;
  PlacesInTurn places_;
  SmallAllreduce small_;
  SmallGather gather_;
  OrderedExchange exchange_;
  ReadyCounts counts_;
  std::vector<std::unique_ptr<PreparedInNode>> calls_;
  std::unique_ptr<PreparedInNode> more_rows_;  // the gather, where this rank gives more
  std::uint64_t plan_ = 1;
  std::uint64_t count_ = 0;  // of operations that were begun in it
  std::vector<float> inputs_, results_;
  int turn_ = 0;  // of the operation that was begun last, as what follows
  float* from_ = nullptr;
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

Cases cases() {
  return {
      {"changes of 1", [] { changes(1, 5); }},
      {"changes of 2 asleep", [] { changes(2, 0); }},
      {"changes of 2 spinning", [] { changes(2, 1000); }},
      {"changes of 3 asleep", [] { changes(3, 0); }},
      {"changes of 3 spinning", [] { changes(3, 1000); }},
      {"prepared operations of 1", [] { prepared(1, 5); }},
      {"prepared operations of 2 asleep", [] { prepared(2, 0); }},
      {"prepared operations of 2 spinning", [] { prepared(2, 1000); }},
      {"prepared operations of 3 asleep", [] { prepared(3, 0); }},
      {"prepared operations of 3 spinning", [] { prepared(3, 1000); }},
  };
}

}  // namespace hvdlite::of_plans
