#include "small_allreduce.h"

#include <algorithm>
#include <stdexcept>

#include "ascending_copy.h"
#include "reduce.h"
#include "spin.h"

namespace hvdlite {
namespace {

constexpr std::uint32_t kSets = 2;

// Where one tensor has all that is reduced, as it travels; else 0.
std::uintptr_t where_one_has_all(const TensorList& tensors, const TensorReduction& job) {
  return job.dtype == job.wire_dtype ? tensors.address_of(0, job.numel, item_bytes(job.wire_dtype)) : 0;
}

}  // namespace

struct SmallAllreduce::Line {
  alignas(kCacheLine) Word turn;  // futex
  Word sleepers;                  // of other ranks, on `turn`
};

SmallAllreduce::SmallAllreduce(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us)
    : address_(address),
      abort_(reinterpret_cast<Word*>(abort_address)),
      spin_(std::max(spin_us, 0)),
      rank_(static_cast<std::uint32_t>(rank)),
      size_(static_cast<std::uint32_t>(size)),
      most_bytes_(most_bytes(size)),
      scratch_(new char[most_bytes_]) {
  if (size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("SmallAllreduce: rank must be in [0, size)");
  if (address == 0 || address % kCacheLine != 0) {
    throw std::invalid_argument("SmallAllreduce: address must be a multiple of 64");
  }
  // Relaxed: no other rank writes it, and what has last done so for this rank was over before this was built.
  turn_ = line(rank_).turn.load(std::memory_order_relaxed);
}

std::size_t SmallAllreduce::bytes_needed(int size) {
  return static_cast<std::size_t>(size) * (sizeof(Line) + kSets * most_bytes(size));
}

SmallAllreduce::Line& SmallAllreduce::line(std::uint32_t rank) const {
  return *reinterpret_cast<Line*>(address_ + rank * sizeof(Line));
}

std::uintptr_t SmallAllreduce::place(std::uint32_t rank) const {
  const std::uint32_t in_set = (rank + turn_ / kSets) % size_;
  return address_ + size_ * sizeof(Line) + (turn_ % kSets * size_ + in_set) * most_bytes_;
}

bool SmallAllreduce::has_begun(std::uint32_t rank) const {
  const std::uint32_t theirs = line(rank).turn.load(std::memory_order_seq_cst);
  return static_cast<std::int32_t>(theirs - turn_) >= 0;  // counts may wrap
}

WaitStatus SmallAllreduce::run(const TensorReduction& job, double timeout_s) {
  if (!has_begun_) begin(job);
  const WaitStatus status = finish(job, timeout_s);
  has_begun_ = false;
  return status;
}

// Counts that were stored for what is withdrawn are one above those of ranks that have not begun. So all go on at two
// above, where nobody has been.
void SmallAllreduce::withdraw() {
  turn_ += has_begun_ ? 1 : 2;
  has_begun_ = false;
}

std::uintptr_t SmallAllreduce::own_source(const TensorReduction& job) const {
  const std::uintptr_t tensor = where_one_has_all(job.inputs, job);
  return tensor != 0 ? tensor : reinterpret_cast<std::uintptr_t>(scratch_.get());
}

void SmallAllreduce::begin(const TensorReduction& job) {
  const std::uint64_t bytes = job.numel * item_bytes(job.wire_dtype);
  if (bytes > most_bytes_) throw std::invalid_argument("SmallAllreduce: too many bytes");
  ++turn_;
  has_begun_ = true;
  if (where_one_has_all(job.inputs, job) == 0) {
    job.inputs.pack(own_source(job), 0, job.numel, job.dtype, job.wire_dtype, 1.0);
  }
  ascending_copy(place(rank_), own_source(job), bytes);
  Line& own = line(rank_);
  own.turn.store(turn_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.turn);
}

bool SmallAllreduce::all_have_begun() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!has_begun(rank)) return false;
  }
  return true;
}

WaitStatus SmallAllreduce::finish(const TensorReduction& job, double timeout_s) {
  const Reducer reducer(job.wire_dtype, job.op, job.prescale, job.postscale);
  if (!all_have_begun()) {
    const WaitStatus status = await_all(time_after(timeout_s));
    if (status != WaitStatus::kOk) return status;
  }
  std::vector<std::uintptr_t> sources;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    sources.push_back(rank == rank_ ? own_source(job) : place(rank));
  }
  const std::uintptr_t tensor = where_one_has_all(job.outputs, job);
  if (tensor != 0) {
    reducer.reduce({tensor}, sources, 0, job.numel);
  } else {
    const auto result = reinterpret_cast<std::uintptr_t>(scratch_.get());
    reducer.reduce({result}, sources, 0, job.numel);
    job.outputs.unpack(result, 0, job.numel, job.wire_dtype, job.dtype, 1.0);
  }
  return WaitStatus::kOk;
}

WaitStatus SmallAllreduce::await_all(Clock::time_point until) {
  if (is_aborted(*abort_)) return WaitStatus::kAborted;
  if (spin_until(std::min(Clock::now() + spin_, until), [&] { return all_have_begun(); })) return WaitStatus::kOk;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    Line& its = line(rank);
    its.sleepers.fetch_add(1, std::memory_order_seq_cst);
    WaitStatus status = WaitStatus::kOk;
    while (!has_begun(rank)) {
      const std::uint32_t theirs = its.turn.load(std::memory_order_seq_cst);
      const auto now = Clock::now();
      if (is_aborted(*abort_)) {
        status = WaitStatus::kAborted;
      } else if (now >= until) {
        status = WaitStatus::kTimeout;
      }
      if (status != WaitStatus::kOk) break;
      if (!has_begun(rank)) futex_wait(its.turn, theirs, std::min(until, now + kAbortLook));
    }
    its.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (status != WaitStatus::kOk) return status;
  }
  return WaitStatus::kOk;
}

std::vector<int> SmallAllreduce::late() const {
  std::vector<int> ranks;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!has_begun(rank)) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void SmallAllreduce::wake_all() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) futex_wake_all(line(rank).turn);
}

}  // namespace hvdlite
