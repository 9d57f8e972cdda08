// An operation of a frozen plan that comes again and again, as one call of which no Python is part.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace hvdlite {

class SplitPhaseCall;

class DirectCall {
 public:
  DirectCall() = default;
  DirectCall(const DirectCall&) = delete;
  DirectCall& operator=(const DirectCall&) = delete;
  virtual ~DirectCall() = default;

  // kNotYet: other ranks are late, and nothing was done. kDoneAndRung: it was done, and this rank was rung meanwhile.
  // kBegun: the caller has to bring it to its end.
  enum class Result { kDone = 0, kNotYet = 1, kDoneAndRung = 2, kTimeout = 3, kAborted = 4, kBegun = 5 };

  // Of the last `run`: which operation of which plan it was for, and how it ended.
  struct Last {
    std::uint64_t plan;
    std::uint64_t count;  // 0: there was none
    Result result;
  };

  // The same in two phases; null where it is not done so.
  virtual SplitPhaseCall* split_phase() { return nullptr; }

  // Whether `run` may be called now.
  virtual bool can_run() const { return true; }
  // Rows of the result for which callers have to make room, where that is not always the same.
  virtual std::uint64_t result_rows() const { return 0; }

  // Says that this rank is ready for operation `count` of `plan`, counted from 1, and does it once all ranks are.
  // `heard`: how many rings this rank has followed; any more end its waits, as late ranks do.
  virtual Result run(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs,
                     std::uint64_t plan, std::uint64_t count, std::uint32_t heard) = 0;

  const Last& last() const { return last_; }

 protected:
  Last last_{};
};

// Between the two phases the other ranks do not wait for this one, and nothing else of the plan may be done. For the
// arguments see `DirectCall::run`.
class SplitPhaseCall {
 public:
  using Result = DirectCall::Result;

  // The first phase. If it throws, nobody has been told.
  virtual void start(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs,
                     std::uint64_t plan, std::uint64_t count) = 0;
  // Whether all ranks have started, or do so within `moment`.
  virtual bool is_ready(std::chrono::microseconds moment) const = 0;
  // The second phase; returns what `run` would.
  virtual Result complete(std::uint32_t heard) = 0;
  // It as well, if `is_ready(kMoment)`; else this rank is rung once all have started. Never kDoneAndRung.
  virtual Result complete_now() = 0;

  // What ranks that do the same at the same time are apart: less than it takes to leave something to another thread.
  static constexpr std::chrono::microseconds kMoment{50};

 protected:
  ~SplitPhaseCall() = default;
};

}  // namespace hvdlite
