// Collectives of ranks of one node that all make the same calls in the same order, so that nothing is negotiated.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/elements.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "waiting/signal.h"

namespace hvdlite {

// Each rank has two windows in shared memory, a count of the steps for which it has filled one, and a card that says
// which collective it has come for. A collective takes one step for each piece that a window holds: a rank fills its
// window, counts, waits until all ranks have counted as far, looks at their cards, and reads their windows.
//
// The windows take turns. Whoever fills one for step n + 2 has seen all counts of step n + 1, and a rank counts there
// when it has read the windows of step n. So one wait per step is enough, and whoever sends fills one window while the
// others read the one before.
//
// Before a rank has read or written anything for a collective it has seen the cards of all. So ranks that contradict
// one another find out together, and each has done the same number of steps.
//
// A count is stored with release order after what it stands for, and loaded with acquire order before that is read.
// Counts on which somebody sleeps are Dekker's pattern, see PlacesInTurn.
class OrderedExchange {
 public:
  // kTimeout: ranks are late; the same call, made again, goes on waiting. All others but kOk and kContradiction end it.
  // kContradiction: ranks have come for different collectives, or mean different sizes; nothing was done, on all ranks.
  // kDeparted: a rank that has to come has left.
  enum class Result : int { kOk = 0, kTimeout = 1, kAborted = 2, kContradiction = 3, kDeparted = 4 };

  using Part = std::pair<std::uintptr_t, std::uint64_t>;  // address, bytes

  // `address`: of `bytes_needed` zeroed bytes, a multiple of 64; or counts of all ranks that are alike, from which it
  // goes on. `abort_address`: ends every wait. Where a rank takes `streamed_bytes` or more in one `alltoall`,
  // `spread` or `broadcast`, they go past its caches.
  OrderedExchange(std::uintptr_t address, int rank, int size, std::uintptr_t abort_address, int spin_us,
                  std::uint64_t window_bytes, std::uint64_t streamed_bytes);

  static std::size_t bytes_needed(int size, std::uint64_t window_bytes);

  // Of all methods: `card` is what all ranks have to show. One part per rank, in the order of ranks.

  Result meet(std::uint64_t card, double timeout_s);
  // departures[r] goes to rank r, arrivals[s] comes from rank s.
  Result alltoall(std::uint64_t card, const std::vector<Part>& departures, const std::vector<Part>& arrivals,
                  double timeout_s);
  // The same bytes go to all; a rank takes them from those whose arrival is not empty.
  Result spread(std::uint64_t card, Part departure, const std::vector<Part>& arrivals, double timeout_s);
  // `tensors`, in a layout of so many bytes, become those of rank `root`.
  Result broadcast(std::uint64_t card, const TensorList& tensors, std::uint64_t bytes, int root, double timeout_s);
  // Everybody's `numbers`, rank by rank; all have as many.
  Result tell(std::uint64_t card, const std::vector<std::int64_t>& numbers, std::vector<std::int64_t>& told,
              double timeout_s);
  // inputs[r], of numels[r] elements, is what this rank gives to the result of rank r, which is `output` here. Address
  // 0 stands for zeros that nobody stored, and for a result that nobody wants.
  Result reduce_scatter(std::uint64_t card, const std::vector<std::uintptr_t>& inputs,
                        const std::vector<std::uint64_t>& numels, std::uintptr_t output, DType dtype,
                        const Reducer& reducer, double timeout_s);

  // What `alltoall` has sent to other ranks, and received from them, so far: a message is what one has for another.
  struct Traffic {
    std::uint64_t messages_sent = 0;
    std::uint64_t bytes_sent = 0;
    std::uint64_t messages_received = 0;
    std::uint64_t bytes_received = 0;
  };
  const Traffic& traffic() const { return traffic_; }

  // From here on whoever waits for this rank learns that it will not come.
  void leave();
  // The ranks for which the last call has waited in vain, or the one under way waits.
  std::vector<int> late() const;
  // The ranks that have left, whether a call waits for them or not.
  std::vector<int> departed() const;
  // Makes every sleeper look at the abort word.
  void wake_all() const;

 private:
  struct Line;
  using Copy = void (*)(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes);

  Line& line(std::uint32_t rank) const;
  std::uint64_t* sizes(std::uint32_t rank) const;
  std::uintptr_t window(std::uint32_t rank) const;
  bool has_counted(std::uint32_t rank) const;
  bool has_departed(std::uint32_t rank) const;
  bool will_not_come(std::uint32_t rank) const;
  bool all_have_counted() const;
  bool sizes_agree() const;
  std::uint64_t longest() const;
  template <class Fill>
  Result step(std::uint64_t card, std::uint64_t longest, Clock::time_point until, Fill fill);
  Copy copy_of(std::uint64_t bytes) const;
  void count(const std::vector<Part>& departures, const std::vector<Part>& arrivals);
  template <class Fill, class Read>
  Result pieces(std::uint64_t card, std::uint64_t longest, std::uint64_t piece_bytes, double timeout_s, Fill fill,
                Read read);
  Result await_all(Clock::time_point until);

  std::uintptr_t address_;
  Word* abort_;
  std::chrono::microseconds spin_;
  std::uint32_t rank_;
  std::uint32_t size_;
  std::uint64_t window_bytes_;
  std::uint64_t streamed_bytes_;
  // Counts steps; may wrap. The caller's thread alone writes it. Other threads load it in `late`, to compare it with
  // the counts, and read nothing because of it.
  Word turn_{0};
  bool counted_ = false;     // for step `turn_`, whose wait a timeout has ended
  std::uint64_t piece_ = 0;  // of the collective that a timeout has ended
  Traffic traffic_;
};

}  // namespace hvdlite
