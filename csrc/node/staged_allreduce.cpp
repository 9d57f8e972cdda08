#include "node/staged_allreduce.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/ascending_copy.h"
#include "kernels/reduce.h"

namespace hvdlite {
namespace {

// Small enough that a line which unpacking has just fetched from another core is still in the L1 cache when packing
// writes to it, and that the two and the reduction, which wait for other lines, overlap (2 cores, 16 MiB of fp32:
// 1.39 ms with blocks of 1 KiB, 1.46 with 2 KiB, 1.54 with 64 KiB; 1.40 with one loop for all three).
constexpr std::uint64_t kBlockBytes = 1024;

// One rank's shard of a window: `numel` elements from `begin` on.
struct Shard {
  std::uint64_t begin = 0;
  std::uint64_t numel = 0;
  std::uintptr_t staged = 0;  // in this rank's staging memory
  std::uintptr_t tensor = 0;  // where one tensor has it as it travels; 0 if none does
};

std::uint64_t divide_up(std::uint64_t value, std::uint64_t by) { return (value + by - 1) / by; }

class Run {
 public:
  Run(std::uint64_t rank, const StagedAllreduce& job)
      : job_(job),
        rank_(rank),
        size_(job.staging.size()),
        bytes_(item_bytes(job.wire_dtype)),
        block_(kBlockBytes / bytes_),
        reducer_(job.wire_dtype, job.op, job.prescale, job.postscale),
        leaving_(size_),
        entering_(size_) {
    if (job.numel == 0) return;
    const std::uint64_t line = std::min(job.window_numel, kCacheLine / bytes_);
    const std::uint64_t owners = std::min(size_, job.window_numel / line);
    const std::uint64_t most = job.window_numel / owners / line * line;
    windows_ = divide_up(job.numel, owners * most);
    share_ = divide_up(job.numel, windows_ * owners * line) * line;
  }

  std::uint64_t windows() const { return windows_; }

  void phase(std::uint64_t k) {
    for (std::uint64_t rank = 0; rank < size_; ++rank) {
      leaving_[rank] = k >= 2 && !stays(k - 2, rank) ? shard(k - 2, rank, job_.outputs) : Shard{};
      entering_[rank] = !stays(k, rank) ? shard(k, rank, job_.inputs) : Shard{};
    }
    const std::uint64_t reducing = k >= 1 ? prepare_reduction(k - 1) : 0;
    for (std::uint64_t at = 0; at < share_; at += block_) {
      for (std::uint64_t rank = 0; rank < size_; ++rank) {
        unpack(leaving_[rank], at);
        pack(entering_[rank], at);
      }
      if (at < reducing) reducer_.reduce(destinations_, sources_, at, std::min(at + block_, reducing));
    }
  }

 private:
  Shard shard(std::uint64_t k, std::uint64_t rank, const TensorList& tensors) const {
    const std::uint64_t begin = (rank * windows_ + k) * share_;
    Shard result;
    result.begin = std::min(job_.numel, begin);
    result.numel = k < windows_ ? std::min(job_.numel, begin + share_) - result.begin : 0;
    if (result.numel == 0) return result;
    result.staged = staged(k, rank_, rank);
    if (job_.wire_dtype == job_.dtype) {
      result.tensor = tensors.address_of(result.begin, result.begin + result.numel, bytes_);
    }
    return result;
  }

  // Where `rank` stages the shard of `owner`.
  std::uintptr_t staged(std::uint64_t k, std::uint64_t rank, std::uint64_t owner) const {
    return job_.staging[rank] + (k % kStagingWindows * job_.window_numel + owner * share_) * bytes_;
  }

  // Whether this is our own shard, and can be reduced where its tensors have it.
  bool stays(std::uint64_t k, std::uint64_t rank) const {
    return rank == rank_ && shard(k, rank, job_.inputs).tensor != 0 && shard(k, rank, job_.outputs).tensor != 0;
  }

  // Returns how many elements there are to reduce.
  std::uint64_t prepare_reduction(std::uint64_t k) {
    sources_.clear();
    for (std::uint64_t rank = 0; rank < size_; ++rank) sources_.push_back(staged(k, rank, rank_));
    destinations_ = sources_;
    const Shard input = shard(k, rank_, job_.inputs);
    if (stays(k, rank_)) {
      sources_[rank_] = input.tensor;
      destinations_[rank_] = shard(k, rank_, job_.outputs).tensor;
    }
    return input.numel;
  }

  void pack(const Shard& shard, std::uint64_t at) const {
    if (at >= shard.numel) return;
    const std::uint64_t numel = std::min(block_, shard.numel - at), begin = shard.begin + at;
    if (shard.tensor != 0) {
      ascending_copy(shard.staged + at * bytes_, shard.tensor + at * bytes_, numel * bytes_);
    } else {
      job_.inputs.pack(shard.staged + at * bytes_, begin, begin + numel, job_.dtype, job_.wire_dtype, 1.0);
    }
  }

  void unpack(const Shard& shard, std::uint64_t at) const {
    if (at >= shard.numel) return;
    const std::uint64_t numel = std::min(block_, shard.numel - at), begin = shard.begin + at;
    if (shard.tensor != 0) {
      ascending_copy(shard.tensor + at * bytes_, shard.staged + at * bytes_, numel * bytes_);
    } else {
      job_.outputs.unpack(shard.staged + at * bytes_, begin, begin + numel, job_.wire_dtype, job_.dtype, 1.0);
    }
  }

  const StagedAllreduce& job_;
  std::uint64_t rank_;
  std::uint64_t size_;
  std::uint64_t bytes_;
  std::uint64_t block_;
  Reducer reducer_;
  std::uint64_t share_ = 0;  // of a rank in a window, in elements; the same in all: a block enters where one has left
  std::uint64_t windows_ = 0;
  std::vector<Shard> leaving_;
  std::vector<Shard> entering_;
  std::vector<std::uintptr_t> sources_;
  std::vector<std::uintptr_t> destinations_;
};

}  // namespace

WaitStatus staged_allreduce(Barrier& barrier, const StagedAllreduce& job, double timeout_s) {
  // Before anybody waits: a rank that raised between the barriers would leave the others at the next one.
  if (job.staging.size() != barrier.size()) throw std::invalid_argument("one staging address per rank is needed");
  if (job.window_numel == 0) throw std::invalid_argument("window_numel must be above 0");
  Run run(barrier.rank(), job);
  const std::uint64_t windows = run.windows();
  for (std::uint64_t k = 0; windows > 0 && k < windows + 2; ++k) {
    run.phase(k);
    if (k <= windows) {
      const WaitStatus status = barrier.wait(timeout_s);
      if (status != WaitStatus::kOk) return status;
    }
  }
  return WaitStatus::kOk;
}

}  // namespace hvdlite
