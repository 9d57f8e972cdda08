#include "streams.h"

#include <chrono>
#include <thread>
#include <utility>

#include "settings.h"
#include "unobserved.h"

namespace gpusim {
namespace {

// Of tasks in all streams: legacy streams and blocking ones wait for what was enqueued in one another.
std::mutex enqueueing;
std::vector<Stream*>& blocking_streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}

unsigned next_seed() {
  static std::atomic<unsigned> made{0};
  return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

void Mark::reach() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  reached_ns.store(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), std::memory_order_relaxed);
  reached.store(true, std::memory_order_release);
}

Stream::Stream(Context* of, Kind kind) : context(of), kind_(kind), random_(next_seed()) {
  if (kind == Kind::kBlocking) {
    const Locked locked(enqueueing);
    blocking_streams().push_back(this);
  }
  std::thread([this, actor = announce_stream()] {
    become(actor);
    work();
    retire();
  }).detach();
}

void Stream::push(std::function<void()> run, Condition ready) {
  auto* task = new Task;
  task->run = std::move(run);
  task->ready = std::move(ready);
  if (const std::size_t room = settings().room; room > 0) {
    take_turn([this, room] {
      const Locked locked(mutex_);
      return tasks_.size() < room;
    });
  }
  enqueue(task, true);
}

Mark* Stream::push_mark() {
  auto* mark = new Mark;
  push([mark] { mark->reach(); });
  return mark;
}

void Stream::synchronize() {
  auto* mark = new Mark;
  auto* task = new Task;
  task->run = [mark] { mark->reached.store(true, std::memory_order_release); };
  enqueue(task, false);
  take_turn([this, mark] { return mark->is_reached() || has_stopped_; });  // it may have been destroyed meanwhile
}

void Stream::end() {
  const Locked locked(mutex_);
  is_ended_ = true;
  changed_.notify_one();
}

void Stream::enqueue(Task* task, bool joins) {
  switch_point();
  task->enqueued.store(1, std::memory_order_release);
  const Locked order(enqueueing);
  if (joins && kind_ != Kind::kNonBlocking) join(task);
  const Locked locked(mutex_);
  tasks_.push_back(task);
  changed_.notify_one();
}

void Stream::join(Task* task) {
  if (kind_ == Kind::kLegacy) {
    for (const Stream* stream : blocking_streams()) {
      if (stream->context == context && stream->last_ != nullptr) task->after.push_back(stream->last_);
    }
  } else if (context->legacy != nullptr && context->legacy->last_ != nullptr) {
    task->after.push_back(context->legacy->last_);
  }
  task->done = last_ = new Mark;
}

void Stream::work() {
  while (Task* task = next()) {
    if (const int jitter_us = settings().jitter_us; jitter_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % jitter_us));
    }
    task->run();
    if (task->done != nullptr) task->done->reached.store(true, std::memory_order_release);
    delete task;
  }
  has_stopped_ = true;
}

// Null: the stream has ended.
Stream::Task* Stream::next() {
  if (!settings().pct) {  // rather than look for a task time and again
    Locked locked(mutex_);
    changed_.wait(locked.lock(), [this] { return !tasks_.empty() || is_ended_; });
  }
  Task* task = nullptr;
  take_turn([this, &task] {
    {
      const Locked locked(mutex_);
      task = tasks_.empty() ? nullptr : tasks_.front();
      if (task == nullptr) return is_ended_;
    }
    return is_ready(*task);
  });
  if (task != nullptr) {
    const Locked locked(mutex_);
    tasks_.pop_front();
  }
  return task;
}

bool Stream::is_ready(const Task& task) {
  task.enqueued.load(std::memory_order_acquire);
  for (const Mark* mark : task.after) {
    if (!mark->is_reached()) return false;
  }
  return !task.ready || task.ready();
}

Stream* legacy_stream(Context* context) {
  const Locked locked(enqueueing);
  if (context->legacy == nullptr) context->legacy = new Stream(context, Stream::Kind::kLegacy);
  return context->legacy;
}

void Event::record(Stream& stream) { latest_ = stream.push_mark(); }

Mark* Event::latest() { return latest_; }

}  // namespace gpusim
