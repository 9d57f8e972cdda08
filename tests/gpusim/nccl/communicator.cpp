#include "communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "driver.h"
#include "elements.h"

namespace nccl_sim {

std::atomic<int> injected{kSuccess}, refusals{0};

namespace {

void jitter() {
  const char* limit_us = std::getenv("GPUSIM_JITTER_US");
  if (limit_us == nullptr || std::atoi(limit_us) <= 0) return;
  thread_local std::minstd_rand random(std::random_device{}());
  std::this_thread::sleep_for(std::chrono::microseconds(random() % unsigned(std::atoi(limit_us))));
}

bool is_refused() {
  int left = refusals;
  while (left > 0 && !refusals.compare_exchange_weak(left, left - 1)) {
  }
  return left > 0;
}

// As NCCL's own settings: 1 if not set.
bool is_on(const char* setting) {
  const char* value = std::getenv(setting);
  return value == nullptr || std::string(value) != "0";
}

struct Living {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Communicator>> all;

  static Living& get() {
    static auto* living = new Living;
    return *living;
  }
};

}  // namespace

Communicator::Communicator(int rank, int size) : rank_(rank), size_(size) {
  if (Driver::get().pop(&context_) != 0) die("no context is current");
  Driver::get().push(context_);
}

Communicator::~Communicator() {
  if (meeting_ != nullptr) munmap(meeting_, sizeof(Meeting));
}

void* Communicator::publish() {
  const std::lock_guard<std::mutex> lock(Living::get().mutex);
  Living::get().all[this] = shared_from_this();
  return this;
}

std::shared_ptr<Communicator> Communicator::find(void* handle) {
  const std::lock_guard<std::mutex> lock(Living::get().mutex);
  const auto it = Living::get().all.find(handle);
  if (it == Living::get().all.end()) die("a communicator is used that there is not");
  return it->second;
}

int Communicator::living() {
  const std::lock_guard<std::mutex> lock(Living::get().mutex);
  return static_cast<int>(Living::get().all.size());
}

std::shared_ptr<Communicator> Communicator::remove(void* handle) {
  auto communicator = find(handle);
  const std::lock_guard<std::mutex> lock(Living::get().mutex);
  Living::get().all.erase(handle);
  return communicator;
}

void Communicator::connect(Place place) {
  later([this, place] {
    if (!open(place)) return kSystem;
    meeting_->joined.fetch_add(1);
    meeting_->ring();
    const bool all_came = wait_until([&] { return meeting_->joined >= size_; });
    if (all_came && place.pid == getpid() && !meeting_->is_closed.exchange(true)) close(place.fd);
    return all_came ? kSuccess : kInternal;
  });
}

void Communicator::enqueue(std::vector<Operation> operations, void* stream) {
  ++calls_;
  ++in_flight_;
  for (const Operation& operation : operations) memory_.begin_use(operation.description.place);
  later([this, operations = std::move(operations), stream] {
    jitter();
    auto* run = new std::function<void()>([self = shared_from_this(), operations] {
      const std::lock_guard<std::mutex> lock(self->running_);
      for (const Operation& operation : operations) self->run(operation);
      for (const Operation& operation : operations) self->memory_.end_use(operation.description.place);
      --self->in_flight_;
    });
    const auto call = [](void* argument) {
      const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(argument));
      (*owned)();
    };
    Driver::get().push(context_);
    const int result = Driver::get().launch(stream, call, run);
    void* before;
    Driver::get().pop(&before);
    return result == 0 ? kSuccess : kCuda;
  });
}

void Communicator::finalize() {
  is_finalized_ = true;
  later([this] { return wait_until([&] { return in_flight_ == 0; }) ? kSuccess : kInternal; });
}

void Communicator::abort() {
  aborted_ = true;
  jitter();
  const std::lock_guard<std::mutex> lock(running_);  // nobody touches memory any more
  memory_.abandon();
}

void Communicator::destroy() {
  memory_.require_none();
  while (in_flight_ != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Communicator::register_window(const void* begin, std::size_t nbytes, void** handle) {
  *handle = nullptr;
  if (!is_on("NCCL_WIN_ENABLE")) return;
  const Window own{nbytes, calls_};
  later([this, begin, nbytes, handle, own] {
    if (is_refused()) return kCuda;
    if (!RegisteredMemory::is_fit(begin, nbytes)) return kInvalidArgument;
    if (!meet(own)) return kInternal;
    jitter();
    *handle = memory_.add(begin, nbytes, Kind::kWindow);
    return kSuccess;
  });
}

Result Communicator::register_buffer(const void* begin, std::size_t nbytes, void** handle) {
  *handle = nullptr;
  if (!is_on("NCCL_LOCAL_REGISTER")) return kSuccess;
  if (is_refused()) return kCuda;
  if (!RegisteredMemory::is_fit(begin, nbytes)) return kInvalidArgument;
  *handle = memory_.add(begin, nbytes, Kind::kBuffer);
  return kSuccess;
}

void Communicator::deregister(void* handle, Kind kind) {
  if (handle == nullptr) return;
  if (state() != kSuccess) die("memory is deregistered while a call is on its way, or after a failure");
  if (is_finalized_) die("memory is deregistered after the end");
  memory_.remove(handle, kind);
}

// On a thread of its own; what it returns becomes the state.
void Communicator::later(std::function<Result()> work) {
  state_ = kInProgress;
  std::thread([self = shared_from_this(), work = std::move(work)] { self->state_ = work(); }).detach();
}

bool Communicator::open(Place place) {
  const std::string path = "/proc/" + std::to_string(place.pid) + "/fd/" + std::to_string(place.fd);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return false;
  void* memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return false;
  meeting_ = static_cast<Meeting*>(memory);
  return meeting_->nonce == place.nonce;
}

// False if it was aborted before.
template <class Condition>
bool Communicator::wait_until(Condition condition) {
  while (!aborted_) {
    const std::uint32_t seen = meeting_->changes;
    if (condition()) return true;
    meeting_->sleep(seen);
  }
  return false;
}

// All ranks register a window.
bool Communicator::meet(const Window& own) {
  auto& windows = meeting_->windows;
  const std::uint64_t number = windows[rank_].made + 1;
  windows[rank_].last[number % 2] = own;
  windows[rank_].made = number;
  meeting_->ring();
  for (int rank = 0; rank < size_; ++rank) {
    if (!wait_until([&] { return windows[rank].made >= number; })) return false;
    if (!(windows[rank].last[number % 2] == own)) die("ranks register other windows, or between other calls");
  }
  return true;
}

void Communicator::run(const Operation& operation) {
  const Description& what = operation.description;
  const std::size_t itemsize = item_bytes(what.dtype), step = kSlotBytes / itemsize;
  for (std::size_t begin = 0; begin < what.count && !aborted_; begin += step) {
    exchange(operation, begin * itemsize, std::min(step, what.count - begin));
  }
}

void Communicator::exchange(const Operation& operation, std::size_t offset, std::size_t count) {
  const Description& what = operation.description;
  const std::uint64_t number = ++pieces_;
  auto& own = meeting_->progress[rank_];
  const bool is_free = wait_until([&] {
    for (int rank = 0; rank < size_; ++rank) {
      if (meeting_->progress[rank].consumed + kSlots < number) return false;
    }
    return true;
  });
  if (!is_free) return;
  Slot& slot = meeting_->slots[rank_][number % kSlots];
  slot.description = what;
  if (operation.from != nullptr) std::memcpy(slot.data, operation.from + offset, count * item_bytes(what.dtype));
  own.posted = number;
  meeting_->ring();
  if (operation.to != nullptr && !receive(operation, offset, count, number)) return;
  own.consumed = number;
  meeting_->ring();
}

bool Communicator::receive(const Operation& operation, std::size_t offset, std::size_t count, std::uint64_t number) {
  const Description& what = operation.description;
  std::vector<const char*> data;
  for (int rank = 0; rank < size_; ++rank) {
    if (what.kind == kBroadcast && rank != what.root) continue;
    const Slot& slot = meeting_->slots[rank][number % kSlots];
    const bool is_there = wait_until([&] { return meeting_->progress[rank].posted >= number; });
    if (is_there && slot.description.place != what.place) die("ranks use different places of registered memory");
    if (!is_there || !(slot.description == what)) return wait_until([] { return false; });
    data.push_back(slot.data);
  }
  if (what.kind == kBroadcast) {
    std::memcpy(operation.to + offset, data[0], count * item_bytes(what.dtype));
  } else {
    reduce(operation.to + offset, data, count, what.dtype, what.op);
  }
  return true;
}

}  // namespace nccl_sim
