// Streams and events: what orders what CUDA orders, and nothing else.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <vector>

#include "devices.h"
#include "scheduler.h"

namespace gpusim {

// A point in a stream. Never freed: a reference count would order those who drop it.
struct Mark {
  std::atomic<bool> reached{false};
  std::atomic<std::int64_t> reached_ns{0};
  void reach();
  bool is_reached() const { return reached.load(std::memory_order_acquire); }
};

// A queue, and a thread that executes what is in it. A task comes after the call that enqueues it and after the task
// before. Who enqueues learns nothing of what has been executed.
struct Stream {
  // Blocking streams and the legacy stream of a context wait for one another.
  enum class Kind { kLegacy, kBlocking, kNonBlocking };

  Stream(Context* of, Kind kind);

  // `run` once `ready`; null: at once.
  void push(std::function<void()> run, Condition ready = nullptr);
  Mark* push_mark();
  // Returns once everything is done that was enqueued before.
  void synchronize();
  // What was enqueued is still executed.
  void end();

  Context* const context;
  std::atomic<bool> is_capturing{false};

 private:
  struct Task {
    std::function<void()> run;
    Condition ready;
    std::vector<Mark*> after;      // of the legacy stream, or of the blocking ones
    Mark* done = nullptr;          // that others may wait for; none of a non-blocking stream
    std::atomic<int> enqueued{0};  // its release is all that a task has from who enqueues it
  };

  void enqueue(Task* task, bool joins);
  void join(Task* task);
  void work();
  Task* next();
  static bool is_ready(const Task& task);

  const Kind kind_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task*> tasks_;  // that have not been executed
  bool is_ended_ = false;
  std::atomic<bool> has_stopped_{false};  // and does nothing that is enqueued from now on
  Mark* last_ = nullptr;
  std::minstd_rand random_;
};

// The legacy stream of a context, made when it is first used.
Stream* legacy_stream(Context* context);

class Event {
 public:
  Event(Context* of, bool timed) : context(of), is_timed(timed) {}

  void record(Stream& stream);
  // Of the latest call; null before the first.
  Mark* latest();

  Context* const context;
  const bool is_timed;

 private:
  // Not atomic: threads that record an event and wait for it must agree on which comes first, or they race.
  Mark* latest_ = nullptr;
};

}  // namespace gpusim
