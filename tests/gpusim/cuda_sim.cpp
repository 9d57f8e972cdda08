// libcuda.so.1 for machines without a GPU, as far as hvdlite calls it: a stream is a thread, device memory is memory of
// the host that begins as NaN, and nothing is ordered that CUDA would not order. HVDLITE_CUDA_LIBRARY names it.
//
// It is stricter than a driver where a driver's behaviour depends on luck: copies take device and pinned memory only,
// and every call but cuInit's kind needs a current context. GPUSIM_JITTER_US delays everything a stream does by up to so
// much.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr int kOk = 0, kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600, kNotPermitted = 800;

using Flag = std::shared_ptr<std::atomic<bool>>;

void wait_for(const Flag& flag) {
  while (!flag->load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

thread_local bool in_callback = false;
thread_local std::vector<void*> contexts;
int the_context;  // of the only device; its address is the handle

// What a driver says before it does anything.
int refusal() {
  if (in_callback) return kNotPermitted;
  return contexts.empty() || contexts.back() == nullptr ? kInvalidContext : kOk;
}

// A queue that orders what CUDA orders: what is enqueued comes after the call that enqueues it, and after what was
// enqueued before. Whoever enqueues learns nothing of what the stream has done, not even by way of a lock, so that
// ThreadSanitizer sees a missing wait whatever the timing.
class Stream {
 public:
  Stream() : jitter_us_(std::getenv("GPUSIM_JITTER_US") ? std::atoi(std::getenv("GPUSIM_JITTER_US")) : 0) {
    static std::atomic<unsigned> made{0};
    random_.seed(++made);
    std::thread([this] { work(); }).detach();
  }

  void push(std::function<void()> run) {
    auto* task = new Task{std::move(run)};
    const std::lock_guard<std::mutex> lock(enqueueing_);
    last_->next.store(task, std::memory_order_release);
    last_ = task;
    enqueued_.fetch_add(1, std::memory_order_relaxed);
    futex(FUTEX_WAKE_PRIVATE, 1);
  }

 private:
  struct Task {
    std::function<void()> run;
    std::atomic<Task*> next{nullptr};
  };

  void work() {
    while (true) {
      Task* task;
      while (true) {
        const std::uint32_t seen = enqueued_.load(std::memory_order_relaxed);
        if ((task = done_->next.load(std::memory_order_acquire)) != nullptr) break;
        futex(FUTEX_WAIT_PRIVATE, seen);
      }
      if (jitter_us_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % jitter_us_));
      task->run();
      task->run = nullptr;
      done_ = task;  // the one before is left to the end of the process: its enqueuer may still look at it
    }
  }

  // A system call, in which ThreadSanitizer sees no order; a stream that has nothing to do takes no core.
  void futex(int operation, std::uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&enqueued_), operation, value, nullptr, nullptr, 0);
  }

  std::atomic<std::uint32_t> enqueued_{0};
  Task* done_ = new Task;  // executed last; the stream's own
  Task* last_ = done_;     // guarded by enqueueing_
  std::mutex enqueueing_;
  std::minstd_rand random_;
  int jitter_us_;
};

struct Event {
  std::mutex mutex;
  Flag last;  // of the record of the latest call; none before the first

  Flag record() {
    const std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};

Stream& stream_of(void* handle) {
  static auto* legacy = new Stream;
  return handle == nullptr ? *legacy : *static_cast<Stream*>(handle);
}

// All memory that was given out, by where it begins.
class Memory {
 public:
  void* take(std::size_t nbytes, bool on_device) {
    void* memory = std::malloc(nbytes);
    std::memset(memory, 0xff, nbytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(memory)] = {nbytes, on_device};
    return memory;
  }

  bool give(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (blocks_.erase(static_cast<char*>(memory)) == 0) return false;
    std::free(memory);
    return true;
  }

  bool has(const void* begin, std::size_t nbytes) { return find(begin, nbytes, nullptr); }

  bool is_device(const void* begin) {
    bool on_device = false;
    return find(begin, 0, &on_device) && on_device;
  }

 private:
  bool find(const void* begin, std::size_t nbytes, bool* on_device) {
    const auto* address = static_cast<const char*>(begin);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(const_cast<char*>(address));
    if (after == blocks_.begin()) return false;
    const auto& [start, block] = *--after;
    if (address + nbytes > start + block.nbytes) return false;
    if (on_device != nullptr) *on_device = block.on_device;
    return true;
  }

  struct Block {
    std::size_t nbytes;
    bool on_device;
  };
  std::mutex mutex_;
  std::map<char*, Block> blocks_;
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

}  // namespace

#define NEED_CONTEXT \
  if (const int refused = refusal()) return refused

extern "C" {

int cuInit(unsigned) { return kOk; }
int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : error == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR";
  return kOk;
}
int cuGetErrorString(int, const char** text) { return *text = "simulated", kOk; }
int cuDeviceGetCount(int* count) { return *count = 1, kOk; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? kOk : kInvalidValue; }

int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &the_context, kOk; }
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), kOk; }
int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kOk;
}

int cuStreamCreate(void** stream, unsigned) {
  NEED_CONTEXT;
  return *stream = new Stream, kOk;
}
int cuStreamDestroy_v2(void*) { return kOk; }  // what was enqueued is still done
int cuStreamIsCapturing(void*, int* status) { return *status = 0, kOk; }
int cuStreamSynchronize(void* stream) {
  NEED_CONTEXT;
  auto reached = std::make_shared<std::atomic<bool>>(false);
  stream_of(stream).push([reached] { reached->store(true, std::memory_order_release); });
  wait_for(reached);
  return kOk;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  NEED_CONTEXT;
  const Flag flag = static_cast<Event*>(event)->record();  // of this moment; none: no wait
  if (flag) stream_of(stream).push([flag] { wait_for(flag); });
  return kOk;
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  NEED_CONTEXT;
  stream_of(stream).push([=] {
    in_callback = true;
    function(argument);
    in_callback = false;
  });
  return kOk;
}

int cuEventCreate(void** event, unsigned) {
  NEED_CONTEXT;
  return *event = new Event, kOk;
}
int cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), kOk; }
int cuEventRecord(void* event, void* stream) {
  NEED_CONTEXT;
  auto reached = std::make_shared<std::atomic<bool>>(false);
  {
    auto* recorded = static_cast<Event*>(event);
    const std::lock_guard<std::mutex> lock(recorded->mutex);
    recorded->last = reached;
  }
  stream_of(stream).push([reached] { reached->store(true, std::memory_order_release); });
  return kOk;
}
int cuEventQuery(void* event) {
  NEED_CONTEXT;
  const Flag flag = static_cast<Event*>(event)->record();
  return !flag || flag->load(std::memory_order_acquire) ? kOk : kNotReady;
}
int cuEventSynchronize(void* event) {
  NEED_CONTEXT;
  const Flag flag = static_cast<Event*>(event)->record();
  if (flag) wait_for(flag);
  return kOk;
}

int cuMemAlloc_v2(unsigned long long* address, std::size_t nbytes) {
  NEED_CONTEXT;
  return *address = reinterpret_cast<unsigned long long>(memory().take(nbytes, true)), kOk;
}
int cuMemFree_v2(unsigned long long address) { return memory().give(reinterpret_cast<void*>(address)) ? kOk : kInvalidValue; }
int cuMemHostAlloc(void** host, std::size_t nbytes, unsigned) {
  NEED_CONTEXT;
  return *host = memory().take(nbytes, false), kOk;
}
int cuMemFreeHost(void* host) { return memory().give(host) ? kOk : kInvalidValue; }
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t nbytes, void* stream) {
  NEED_CONTEXT;
  auto* target = reinterpret_cast<void*>(to);
  const auto* source = reinterpret_cast<const void*>(from);
  if (!memory().has(target, nbytes) || !memory().has(source, nbytes)) return kInvalidValue;
  stream_of(stream).push([=] { std::memcpy(target, source, nbytes); });
  return kOk;
}
int cuPointerGetAttribute(void* value, int attribute, unsigned long long address) {
  constexpr int kDeviceOrdinal = 9;
  if (attribute != kDeviceOrdinal || !memory().is_device(reinterpret_cast<void*>(address))) return kInvalidValue;
  return *static_cast<int*>(value) = 0, kOk;
}
}
