#include "messages/bound_pipeline.h"

#include <algorithm>

#include "messages/working.h"

namespace hvdlite {
namespace {

using std::chrono::microseconds;

// As in hvdlite/collectives/pipeline.py.
constexpr microseconds kShortestBusyNap(60);  // a shorter one takes as long, by the slack of the kernel's timers
constexpr microseconds kLongestBusyNap(1000);

}  // namespace

BoundPipeline::Progress BoundPipeline::start() {
  sent_ = left_ = posted_ = taken_ = 0;
  moved_at_ = Clock::now();
  for (const Addition& addition : first_) addition.run();
  return advance();
}

BoundPipeline::Progress BoundPipeline::advance() {
  while (send_ready() && post_receives() && take_next()) {
  }
  const bool is_done = taken_ == receives_.size() && sent_ == sends_.size() && have_left(sent_);
  return error_ != 0 ? Progress::kFailed : is_done ? Progress::kDone : Progress::kWaiting;
}

BoundPipeline::Progress BoundPipeline::work(PoliteLook& look, microseconds limit, microseconds longest_nap) {
  return work_until_done(*this, moved_at_, look, limit, longest_nap);
}

// All that may be; false where MPI fails.
bool BoundPipeline::send_ready() {
  while (sent_ < sends_.size() && sends_[sent_].after <= taken_) {
    // Not all at once: what the receiver has not asked for yet would be buffered, and so copied, there.
    if (sent_ + 1 > window_ && !have_left(sent_ + 1 - window_)) break;
    error_ = mpi_.start(sends_[sent_].request);
    if (error_ != 0) break;
    ++sent_;
  }
  return error_ == 0;
}

bool BoundPipeline::post_receives() {
  while (posted_ < std::min(taken_ + window_, receives_.size())) {
    const Receive& receive = receives_[posted_];
    if (!receive.has_slot && !have_left(receive.after)) break;
    error_ = mpi_.start(receive.request);
    if (error_ != 0) break;
    ++posted_;
  }
  return error_ == 0;
}

// Whether there was one.
bool BoundPipeline::take_next() {
  if (taken_ == posted_) return false;
  const Receive& receive = receives_[taken_];
  bool is_here = false;
  error_ = mpi_.test(receive.request, is_here);
  if (error_ != 0 || !is_here || !have_left(receive.after)) return false;
  for (const Addition& addition : receive.additions) addition.run();
  if (taken_ == 0) first_came_ = Clock::now();
  ++taken_;
  return true;
}

// Whether the first `count` sends are done; false as well where MPI fails.
bool BoundPipeline::have_left(std::size_t count) {
  while (left_ < count) {
    if (left_ == sent_) return false;
    bool has_left = false;
    error_ = mpi_.test(sends_[left_].request, has_left);
    if (error_ != 0 || !has_left) return false;
    ++left_;
  }
  return true;
}

// The kernel takes in what comes meanwhile: whoever looks more often takes time from backward and gains none.
microseconds BoundPipeline::busy_for() const {
  const std::size_t to_come = receives_.size() - taken_;
  if (taken_ < 2 || to_come == 0) return microseconds::zero();
  const auto taking = std::chrono::duration_cast<microseconds>(Clock::now() - first_came_);
  const microseconds nap = taking / (taken_ - 1) * std::min(to_come, window_) / 4;
  return nap > kShortestBusyNap ? std::min(nap, kLongestBusyNap) : microseconds::zero();
}

}  // namespace hvdlite
