#include "node/ordered_exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/streaming_copy.h"
#include "waiting/spin.h"

namespace hvdlite {
namespace {

constexpr std::uint64_t kWindows = 2;

std::uint64_t align_up(std::uint64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

void copy(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes) {
  if (bytes == 0) return;  // nothing has the address 0, which memcpy must not be given
  std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes);
}

// Into a window. A store to a line that another core has read has to take it away from there first, one by one: on two
// cores that share no cache 2.3 GB/s, where stores that pass by the caches make 25 (4 MiB from one rank to another in
// windows of 256 KiB: 1.9 ms and 0.18; 0.42 and 0.22 on cores that share one). For few bytes it is the other way round.
constexpr std::uint64_t kFewBytes = 16 << 10;

void put(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes) {
  (bytes < kFewBytes ? copy : streaming_copy)(destination, source, bytes);
}

// Piece `k` of a part that is cut into pieces of `piece_bytes`: where it begins, and how long it is.
OrderedExchange::Part piece_of(const OrderedExchange::Part& part, std::uint64_t k, std::uint64_t piece_bytes) {
  const std::uint64_t begin = std::min(part.second, k * piece_bytes);
  return {part.first + begin, std::min(part.second - begin, piece_bytes)};
}

std::uint64_t total_of(const std::vector<OrderedExchange::Part>& parts) {
  std::uint64_t total = 0;
  for (const auto& part : parts) total += part.second;
  return total;
}

std::uint64_t longest_of(const std::vector<OrderedExchange::Part>& parts) {
  std::uint64_t longest = 0;
  for (const auto& part : parts) longest = std::max(longest, part.second);
  return longest;
}

}  // namespace

struct OrderedExchange::Line {
  struct Said {
    std::uint64_t card;
    std::uint64_t longest;  // bytes of its longest part
  };
  alignas(kCacheLine) Word turn;  // futex
  Word sleepers;                  // of other ranks, on `turn`
  Word departed;
  Said said[kWindows];
};

OrderedExchange::OrderedExchange(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us,
                                 std::uint64_t window_bytes, std::uint64_t streamed_bytes)
    : address_(address),
      abort_(reinterpret_cast<Word*>(abort_address)),
      spin_(std::max(spin_us, 0)),
      rank_(static_cast<std::uint32_t>(rank)),
      size_(static_cast<std::uint32_t>(size)),
      window_bytes_(align_up(window_bytes)),
      streamed_bytes_(streamed_bytes) {
  if (size < 1 || rank < 0 || rank >= size) throw std::invalid_argument("OrderedExchange: rank must be in [0, size)");
  if (address == 0 || address % kCacheLine != 0) {
    throw std::invalid_argument("OrderedExchange: address must be a multiple of 64");
  }
  if (window_bytes_ < kCacheLine * size_) throw std::invalid_argument("OrderedExchange: the windows are too small");
  // Relaxed: no other rank writes it, and what has last done so for this rank was over before this was built.
  turn_ = line(rank_).turn.load(std::memory_order_relaxed);
}

// Lines, then for each rank the sizes of what it sends and expects, then its windows.
std::size_t OrderedExchange::bytes_needed(int size, std::uint64_t window_bytes) {
  const auto ranks = static_cast<std::uint64_t>(size);
  const std::uint64_t table = align_up(2 * ranks * sizeof(std::uint64_t));
  return ranks * (sizeof(Line) + kWindows * (table + align_up(window_bytes)));
}

OrderedExchange::Line& OrderedExchange::line(std::uint32_t rank) const {
  return *reinterpret_cast<Line*>(address_ + rank * sizeof(Line));
}

std::uint64_t* OrderedExchange::sizes(std::uint32_t rank) const {
  const std::uint64_t table = align_up(2 * size_ * sizeof(std::uint64_t));
  const std::uintptr_t tables = address_ + size_ * sizeof(Line);
  return reinterpret_cast<std::uint64_t*>(tables + (kWindows * rank + turn_ % kWindows) * table);
}

std::uintptr_t OrderedExchange::window(std::uint32_t rank) const {
  const std::uint64_t table = align_up(2 * size_ * sizeof(std::uint64_t));
  const std::uintptr_t windows = address_ + size_ * (sizeof(Line) + kWindows * table);
  return windows + (kWindows * rank + turn_ % kWindows) * window_bytes_;
}

// This rank's step is loaded first, for `late` on another thread: the other way round the step could begin in between,
// and a rank that has counted for it by now would pass for late.
bool OrderedExchange::has_counted(std::uint32_t rank) const {
  const std::uint32_t own = turn_.load(std::memory_order_acquire);
  const std::uint32_t theirs = line(rank).turn.load(std::memory_order_seq_cst);
  return static_cast<std::int32_t>(theirs - own) >= 0;  // counts may wrap
}

bool OrderedExchange::has_departed(std::uint32_t rank) const {
  return line(rank).departed.load(std::memory_order_acquire) != 0;
}

// A rank has stored its last count before it departs, so that whoever sees it departed sees that count as well. The
// wake-up may be missed, as that of an abort.
bool OrderedExchange::will_not_come(std::uint32_t rank) const { return has_departed(rank) && !has_counted(rank); }

bool OrderedExchange::all_have_counted() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!has_counted(rank)) return false;
  }
  return true;
}

bool OrderedExchange::sizes_agree() const {
  for (std::uint32_t sender = 0; sender < size_; ++sender) {
    for (std::uint32_t receiver = 0; receiver < size_; ++receiver) {
      if (sizes(sender)[receiver] != sizes(receiver)[size_ + sender]) return false;
    }
  }
  return true;
}

std::uint64_t OrderedExchange::longest() const {
  std::uint64_t longest = 0;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    longest = std::max(longest, line(rank).said[turn_ % kWindows].longest);
  }
  return longest;
}

OrderedExchange::Copy OrderedExchange::copy_of(std::uint64_t bytes) const {
  return bytes < streamed_bytes_ ? copy : streaming_copy;
}

template <class Fill>
OrderedExchange::Result OrderedExchange::step(std::uint64_t card, std::uint64_t longest, Clock::time_point until,
                                              Fill fill) {
  if (!counted_) {
    ++turn_;
    fill();
    Line& own = line(rank_);
    own.said[turn_ % kWindows] = {card, longest};
    own.turn.store(turn_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.turn);
    counted_ = true;
  }
  if (!all_have_counted()) {
    const Result result = await_all(until);
    if (result != Result::kOk) return result;
  }
  counted_ = false;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (line(rank).said[turn_ % kWindows].card != card) return Result::kContradiction;
  }
  return Result::kOk;
}

// `fill(k)` puts piece k into this rank's window, `read(k)` takes it from those of the others.
template <class Fill, class Read>
OrderedExchange::Result OrderedExchange::pieces(std::uint64_t card, std::uint64_t longest, std::uint64_t piece_bytes,
                                                double timeout_s, Fill fill, Read read) {
  const auto until = time_after(timeout_s);
  for (bool is_last = false; !is_last; ++piece_) {
    const Result result = step(card, longest, until, [&] { fill(piece_); });
    if (result == Result::kTimeout) return result;
    if (result != Result::kOk) {
      piece_ = 0;
      return result;
    }
    if (!read(piece_)) {
      piece_ = 0;
      return Result::kContradiction;
    }
    is_last = (piece_ + 1) * piece_bytes >= this->longest();
  }
  piece_ = 0;
  return Result::kOk;
}

OrderedExchange::Result OrderedExchange::meet(std::uint64_t card, double timeout_s) {
  return step(card, 0, time_after(timeout_s), [] {});
}

OrderedExchange::Result OrderedExchange::alltoall(std::uint64_t card, const std::vector<Part>& departures,
                                                  const std::vector<Part>& arrivals, double timeout_s) {
  if (departures.size() != size_ || arrivals.size() != size_)
    throw std::invalid_argument("one part per rank is needed");
  const std::uint64_t slot = window_bytes_ / size_ / kCacheLine * kCacheLine;
  const auto fill = [&](std::uint64_t k) {
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      if (k == 0) {
        sizes(rank_)[rank] = departures[rank].second;
        sizes(rank_)[size_ + rank] = arrivals[rank].second;
      }
      const Part piece = piece_of(departures[rank], k, slot);
      if (rank != rank_) put(window(rank_) + rank * slot, piece.first, piece.second);
    }
  };
  const Copy take = copy_of(total_of(arrivals));
  const auto read = [&](std::uint64_t k) {
    if (k == 0 && !sizes_agree()) return false;
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      const Part piece = piece_of(arrivals[rank], k, slot);
      const std::uintptr_t source =
          rank == rank_ ? piece_of(departures[rank], k, slot).first : window(rank) + rank_ * slot;
      take(piece.first, source, piece.second);
    }
    return true;
  };
  const Result result =
      pieces(card, std::max(longest_of(departures), longest_of(arrivals)), slot, timeout_s, fill, read);
  if (result == Result::kOk) count(departures, arrivals);
  return result;
}

void OrderedExchange::count(const std::vector<Part>& departures, const std::vector<Part>& arrivals) {
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    traffic_.messages_sent += departures[rank].second != 0;
    traffic_.bytes_sent += departures[rank].second;
    traffic_.messages_received += arrivals[rank].second != 0;
    traffic_.bytes_received += arrivals[rank].second;
  }
}

OrderedExchange::Result OrderedExchange::spread(std::uint64_t card, Part departure, const std::vector<Part>& arrivals,
                                                double timeout_s) {
  if (arrivals.size() != size_) throw std::invalid_argument("one part per rank is needed");
  const auto fill = [&](std::uint64_t k) {
    const Part piece = piece_of(departure, k, window_bytes_);
    if (size_ > 1) put(window(rank_), piece.first, piece.second);
  };
  const Copy take = copy_of(total_of(arrivals));
  const auto read = [&](std::uint64_t k) {
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      const Part piece = piece_of(arrivals[rank], k, window_bytes_);
      const std::uintptr_t source = rank == rank_ ? piece_of(departure, k, window_bytes_).first : window(rank);
      if (piece.first != source) take(piece.first, source, piece.second);
    }
    return true;
  };
  return pieces(card, departure.second, window_bytes_, timeout_s, fill, read);
}

OrderedExchange::Result OrderedExchange::broadcast(std::uint64_t card, const TensorList& tensors, std::uint64_t bytes,
                                                   int root, double timeout_s) {
  const auto owner = static_cast<std::uint32_t>(root);
  if (root < 0 || owner >= size_) throw std::invalid_argument("broadcast: root must be in [0, size)");
  const auto end_of = [&](std::uint64_t begin) { return std::min(begin + window_bytes_, bytes); };
  const auto fill = [&](std::uint64_t k) {
    if (rank_ != owner || size_ == 1) return;
    const std::uint64_t begin = k * window_bytes_, end = end_of(begin);
    if (const std::uintptr_t source = tensors.address_of(begin, end, 1)) {
      put(window(rank_), source, end - begin);
    } else {
      tensors.pack(window(rank_), begin, end, DType::kUint8, DType::kUint8, 1.0);
    }
  };
  const Copy take = copy_of(bytes);
  const auto read = [&](std::uint64_t k) {
    if (rank_ == owner) return true;
    const std::uint64_t begin = k * window_bytes_, end = end_of(begin);
    if (const std::uintptr_t target = tensors.address_of(begin, end, 1)) {
      take(target, window(owner), end - begin);
    } else {
      tensors.unpack(window(owner), begin, end, DType::kUint8, DType::kUint8, 1.0);
    }
    return true;
  };
  return pieces(card, bytes, window_bytes_, timeout_s, fill, read);
}

OrderedExchange::Result OrderedExchange::tell(std::uint64_t card, const std::vector<std::int64_t>& numbers,
                                              std::vector<std::int64_t>& told, double timeout_s) {
  told.resize(size_ * numbers.size());
  const std::uint64_t bytes = numbers.size() * sizeof(std::int64_t);
  std::vector<Part> arrivals;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    arrivals.emplace_back(reinterpret_cast<std::uintptr_t>(told.data() + rank * numbers.size()), bytes);
  }
  return spread(card, {reinterpret_cast<std::uintptr_t>(numbers.data()), bytes}, arrivals, timeout_s);
}

OrderedExchange::Result OrderedExchange::reduce_scatter(std::uint64_t card, const std::vector<std::uintptr_t>& inputs,
                                                        const std::vector<std::uint64_t>& numels, std::uintptr_t output,
                                                        DType dtype, const Reducer& reducer, double timeout_s) {
  if (inputs.size() != size_ || numels.size() != size_) throw std::invalid_argument("one input per rank is needed");
  const std::uint64_t item = item_bytes(dtype);
  const std::uint64_t slot = window_bytes_ / size_ / kCacheLine * kCacheLine;
  const auto fill = [&](std::uint64_t k) {
    for (std::uint32_t rank = 0; rank < size_; ++rank) {
      const Part piece = piece_of({inputs[rank], numels[rank] * item}, k, slot);
      const std::uintptr_t place = window(rank_) + rank * slot;
      if (inputs[rank] == 0) {
        std::memset(reinterpret_cast<void*>(place), 0, piece.second);
      } else if (rank != rank_) {
        put(place, piece.first, piece.second);
      }
    }
  };
  std::vector<std::uintptr_t> sources(size_);
  const auto read = [&](std::uint64_t k) {
    const Part piece = piece_of({output, numels[rank_] * item}, k, slot);
    if (output == 0 || piece.second == 0) return true;
    for (std::uint32_t rank = 0; rank < size_; ++rank) sources[rank] = window(rank) + rank_ * slot;
    if (inputs[rank_] != 0) sources[rank_] = piece_of({inputs[rank_], numels[rank_] * item}, k, slot).first;
    reducer.reduce({piece.first}, sources, 0, piece.second / item);
    return true;
  };
  const std::uint64_t longest = *std::max_element(numels.begin(), numels.end()) * item;
  return pieces(card, longest, slot, timeout_s, fill, read);
}

OrderedExchange::Result OrderedExchange::await_all(Clock::time_point until) {
  if (is_aborted(*abort_)) return Result::kAborted;
  if (spin_until(std::min(Clock::now() + spin_, until), [&] { return all_have_counted(); })) return Result::kOk;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    Line& its = line(rank);
    its.sleepers.fetch_add(1, std::memory_order_seq_cst);
    Result result = Result::kOk;
    while (!has_counted(rank)) {
      const std::uint32_t theirs = its.turn.load(std::memory_order_seq_cst);
      const auto now = Clock::now();
      if (is_aborted(*abort_)) {
        result = Result::kAborted;
      } else if (will_not_come(rank)) {
        result = Result::kDeparted;
      } else if (now >= until) {
        result = Result::kTimeout;
      }
      if (result != Result::kOk) break;
      if (!has_counted(rank)) futex_wait(its.turn, theirs, std::min(until, now + kAbortLook));
    }
    its.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (result != Result::kOk) return result;
  }
  return Result::kOk;
}

void OrderedExchange::leave() {
  line(rank_).departed.store(1, std::memory_order_release);
  futex_wake_all(line(rank_).turn);
}

std::vector<int> OrderedExchange::late() const {
  std::vector<int> ranks;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!has_counted(rank)) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::vector<int> OrderedExchange::departed() const {
  std::vector<int> ranks;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (has_departed(rank)) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void OrderedExchange::wake_all() const {
  for (std::uint32_t rank = 0; rank < size_; ++rank) futex_wake_all(line(rank).turn);
}

}  // namespace hvdlite
