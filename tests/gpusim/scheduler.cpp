#include "scheduler.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "settings.h"
#include "unobserved.h"

namespace gpusim {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

class Actor {
 public:
  explicit Actor(bool stream) : is_stream(stream) {}

  enum class State { kStarting, kAway, kWaiting, kGoing };
  const bool is_stream;
  State state = State::kStarting;  // until its thread has come to its first turn
  unsigned priority = 0;
  const Condition* condition = nullptr;  // while it waits
  Clock::time_point since;               // while it goes
  std::condition_variable go;
};

namespace {

constexpr unsigned kChangePoints = 8;  // one turn of so many gets a new priority
constexpr unsigned kHesitations = 8;
constexpr microseconds kLookAgain{50};

class Scheduler {
 public:
  Scheduler() : random_(*settings().pct) {
    std::thread([this] { conduct(); }).detach();
  }

  Actor* add(bool is_stream) {
    const Locked locked(mutex_);
    auto* actor = new Actor(is_stream);
    actor->priority = random_();
    actors_.push_back(actor);
    return actor;
  }

  void remove(Actor* actor) {
    const Locked locked(mutex_);
    actors_.erase(std::find(actors_.begin(), actors_.end(), actor));
    if (going_ == actor) going_ = nullptr;
    changed_.notify_one();
    delete actor;
  }

  void turn(Actor* actor, const Condition& condition) {
    Locked locked(mutex_);
    actor->condition = &condition;
    actor->state = Actor::State::kWaiting;
    if (going_ == actor) going_ = nullptr;
    changed_.notify_one();
    actor->go.wait(locked.lock(), [&] { return actor->state != Actor::State::kWaiting; });
  }

 private:
  void conduct() {
    Locked locked(mutex_);
    while (true) {
      if (going_ != nullptr) {
        await_the_one_that_goes(locked.lock());
      } else if (Actor* next = choose()) {
        if (hesitates_before(*next)) {
          changed_.wait_for(locked.lock(), microseconds(settings().patience_us));
          next = choose();  // perhaps none any more, as a stream has been made meanwhile
        }
        if (next != nullptr) start(next);
      } else {
        changed_.wait_for(locked.lock(), kLookAgain);
      }
    }
  }

  void await_the_one_that_goes(std::unique_lock<std::mutex>& lock) {
    const auto until = going_->since + microseconds(settings().patience_us);
    if (changed_.wait_until(lock, until, [this] { return going_ == nullptr; })) return;
    going_->state = Actor::State::kAway;
    going_ = nullptr;
  }

  Actor* choose() const {
    Actor* best = nullptr;
    for (Actor* actor : actors_) {
      if (actor->state == Actor::State::kStarting) return nullptr;
      if (actor->state != Actor::State::kWaiting || (best != nullptr && best->priority > actor->priority)) continue;
      if ((*actor->condition)()) best = actor;
    }
    return best;
  }

  // Whether a thread of the host that is elsewhere may come first: as by priority it should, if only it were here.
  bool hesitates_before(const Actor& next) {
    const auto goes_before = [&](const Actor* other) {
      return other->state == Actor::State::kAway && other->priority > next.priority;
    };
    return !next.is_stream && std::any_of(actors_.begin(), actors_.end(), goes_before) && random_() % kHesitations == 0;
  }

  void start(Actor* next) {
    if (random_() % kChangePoints == 0) next->priority = random_();
    going_ = next;
    next->since = Clock::now();
    next->state = Actor::State::kGoing;
    next->go.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Actor*> actors_;
  Actor* going_ = nullptr;
  std::mt19937 random_;
};

Scheduler& scheduler() {
  static auto* only = new Scheduler;
  return *only;
}

// Ends with its thread.
struct Role {
  Actor* actor = nullptr;
  ~Role() {
    if (actor != nullptr) scheduler().remove(actor);
  }
};
thread_local Role role;

void poll(const Condition& condition) {
  const Unobserved unobserved;  // what was seen before it held orders nothing
  for (microseconds pause{20}; !condition(); pause = std::min(2 * pause, microseconds(320))) {
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

Actor* announce_stream() {
  const Unobserved unobserved;
  return settings().pct ? scheduler().add(true) : nullptr;
}

void become(Actor* actor) { role.actor = actor; }

void retire() {
  const Unobserved unobserved;
  if (role.actor != nullptr) scheduler().remove(role.actor);
  role.actor = nullptr;
}

void take_turn(const Condition& condition) {
  if (settings().pct) {
    if (role.actor == nullptr) become(scheduler().add(false));
    scheduler().turn(role.actor, condition);
  } else {
    poll(condition);
  }
  condition();  // observed: comes after what made it true
}

void switch_point() {
  if (settings().pct) take_turn([] { return true; });
}

}  // namespace gpusim
