#include "staged_allreduce.h"

#include <algorithm>
#include <stdexcept>

#include "reduce.h"

namespace hvdlite {
namespace {

struct Range {
  std::uint64_t begin;
  std::uint64_t end;
  bool empty() const { return begin == end; }
};

class Run {
 public:
  Run(std::uint64_t rank, const StagedAllreduce& job)
      : job_(job), rank_(rank), size_(job.staging.size()), bytes_(item_bytes(job.wire_dtype)), sources_(size_) {}

  std::uint64_t windows() const { return (job_.numel + job_.window_numel - 1) / job_.window_numel; }

  void pack(std::uint64_t k) const {
    const Range all = window(k), mine = shard(k, rank_);
    if (input_address(mine) == 0) {
      pack_range(k, all);
    } else {
      pack_range(k, {all.begin, mine.begin});
      pack_range(k, {mine.end, all.end});
    }
  }

  void reduce_shard(std::uint64_t k) {
    const Range mine = shard(k, rank_);
    if (mine.empty()) return;
    for (std::uint64_t rank = 0; rank < size_; ++rank) sources_[rank] = packed(k, rank, mine.begin);
    std::vector<std::uintptr_t> destinations{reduced(k, rank_, mine.begin)};
    if (const std::uintptr_t own = input_address(mine)) {
      sources_[rank_] = own;
      destinations.push_back(job_.outputs.address_of(mine.begin, mine.end, bytes_));
    }
    reduce(destinations, sources_, mine.end - mine.begin, job_.wire_dtype, job_.op, job_.prescale, job_.postscale);
  }

  void unpack(std::uint64_t k) const {
    for (std::uint64_t i = 0; i < size_; ++i) {
      const std::uint64_t rank = (rank_ + i) % size_;  // not all at the same one first
      const Range range = shard(k, rank);
      if (range.empty() || (rank == rank_ && input_address(range) != 0)) continue;
      job_.outputs.unpack(reduced(k, rank, range.begin), range.begin, range.end, job_.wire_dtype, job_.dtype, 1.0);
    }
  }

 private:
  Range window(std::uint64_t k) const {
    return {k * job_.window_numel, std::min((k + 1) * job_.window_numel, job_.numel)};
  }

  Range shard(std::uint64_t k, std::uint64_t rank) const {
    const Range all = window(k);
    const std::uint64_t per_line = kCacheLine / bytes_;
    const std::uint64_t share = ((all.end - all.begin + size_ - 1) / size_ + per_line - 1) / per_line * per_line;
    return {std::min(all.begin + rank * share, all.end), std::min(all.begin + (rank + 1) * share, all.end)};
  }

  // Where `range` of inputs and outputs can be used as it is; else 0.
  std::uintptr_t input_address(Range range) const {
    if (job_.wire_dtype != job_.dtype || job_.outputs.address_of(range.begin, range.end, bytes_) == 0) return 0;
    return job_.inputs.address_of(range.begin, range.end, bytes_);
  }

  std::uintptr_t packed(std::uint64_t k, std::uint64_t rank, std::uint64_t element) const {
    return job_.staging[rank] + (k % 2 * job_.window_numel + element - window(k).begin) * bytes_;
  }
  std::uintptr_t reduced(std::uint64_t k, std::uint64_t rank, std::uint64_t element) const {
    return packed(k, rank, element) + 2 * job_.window_numel * bytes_;
  }

  void pack_range(std::uint64_t k, Range range) const {
    if (!range.empty()) {
      job_.inputs.pack(packed(k, rank_, range.begin), range.begin, range.end, job_.dtype, job_.wire_dtype, 1.0);
    }
  }

  const StagedAllreduce& job_;
  std::uint64_t rank_;
  std::uint64_t size_;
  std::uint64_t bytes_;
  std::vector<std::uintptr_t> sources_;
};

}  // namespace

WaitStatus staged_allreduce(Barrier& barrier, const StagedAllreduce& job, double timeout_s) {
  // Before anybody waits: a rank that raised between the barriers would leave the others at the next one.
  if (job.staging.size() != barrier.size()) throw std::invalid_argument("one staging address per rank is needed");
  if (job.window_numel == 0) throw std::invalid_argument("window_numel must be above 0");
  require_reducible(job.wire_dtype, job.op);
  Run run(barrier.rank(), job);
  const std::uint64_t windows = run.windows();
  for (std::uint64_t k = 0; windows > 0 && k < windows + 2; ++k) {
    if (k < windows) run.pack(k);
    if (k >= 1 && k <= windows) run.reduce_shard(k - 1);
    if (k >= 2) run.unpack(k - 2);
    if (k <= windows) {
      const WaitStatus status = barrier.wait(timeout_s);
      if (status != WaitStatus::kOk) return status;
    }
  }
  return WaitStatus::kOk;
}

}  // namespace hvdlite
