// libnccl.so.2 for machines without a GPU, as far as hvdlite calls it: between processes, on the streams of the
// simulated driver that GPUSIM_CUDA_LIBRARY names. HVDLITE_NCCL_LIBRARY names it itself.
//
// Ranks meet in a file in memory, which the process that made the unique id has open: it is gone with the processes.
// An operation is done on a rank once that rank has sent and received its part, others may be behind; it waits for its
// peers forever, whatever became of them, until it is aborted.
//
// It is stricter than NCCL where NCCL's behaviour depends on luck: communicators are non-blocking ones, whose
// operations reach the stream late (GPUSIM_JITTER_US) and by another thread; to call one that is not ready is an error,
// and one that has been given back ends the process.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

enum Result { kSuccess, kCuda, kSystem, kInternal, kInvalidArgument, kInvalidUsage, kRemote, kInProgress };
constexpr int kMostRanks = 16;
constexpr std::size_t kSlots = 2, kSlotBytes = 1 << 14;  // a rank may be so far ahead of the last one

std::atomic<int> injected{kSuccess};

// The simulated driver, by the functions that are needed here.
struct Driver {
  int (*retain)(void** context, int device);
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*attribute)(void* value, int attribute, unsigned long long address);
  int (*launch)(void* stream, void (*function)(void*), void* argument);

  static const Driver& get() {
    static const Driver driver = load();
    return driver;
  }

 private:
  static Driver load() {
    const char* path = std::getenv("GPUSIM_CUDA_LIBRARY");
    void* handle = dlopen(path == nullptr ? "" : path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) die("GPUSIM_CUDA_LIBRARY must name the simulated driver");
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) die(name);
    };
    Driver driver;
    find(driver.retain, "cuDevicePrimaryCtxRetain");
    find(driver.push, "cuCtxPushCurrent_v2");
    find(driver.pop, "cuCtxPopCurrent_v2");
    find(driver.attribute, "cuPointerGetAttribute");
    find(driver.launch, "cuLaunchHostFunc");
    return driver;
  }

 public:
  [[noreturn]] static void die(const char* what) {
    std::fprintf(stderr, "nccl_sim: %s\n", what);
    std::abort();
  }
};

// What one rank has to do, compared between ranks.
struct Description {
  int kind, dtype, op, root;
  std::size_t count;
  bool operator==(const Description& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};
constexpr int kReduceToAll = 0, kReduceToRoot = 1, kBroadcast = 2;

struct Slot {
  Description description;
  char data[kSlotBytes];
};

// The file.
struct Meeting {
  std::uint64_t nonce;
  std::atomic<std::uint32_t> changes;  // a futex
  std::atomic<int> joined;
  std::atomic<bool> is_closed;  // by the process that made it, once all have it open
  struct {
    alignas(64) std::atomic<std::uint64_t> posted, consumed;  // pieces of a slot's size
  } progress[kMostRanks];
  Slot slots[kMostRanks][kSlots];

  void ring() {
    changes.fetch_add(1);
    syscall(SYS_futex, &changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  void sleep(std::uint32_t seen) {  // for a while, since an abort rings nobody
    const timespec limit{0, 2'000'000};
    syscall(SYS_futex, &changes, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
};

// The unique id: where the file is.
struct Place {
  std::uint64_t nonce;
  int pid, fd;
};

float half_to_float(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(fraction), -24)
                                     : std::ldexp(float(fraction + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}

std::uint16_t float_to_half(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < std::ldexp(1.0f, -14)) return sign | unsigned(std::nearbyint(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  return sign | ((unsigned(exponent + 14) << 10) + unsigned(std::nearbyint(std::ldexp(size, 10 - exponent))));
}

float bfloat_to_float(std::uint16_t bits) {
  const std::uint32_t word = std::uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

std::uint16_t float_to_bfloat(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return std::isnan(value) ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

template <class T>
T combined(T a, T b, int op) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<std::conditional_t<(sizeof(T) < 4), int, T>>;
    if (op == 0) return T(U(a) + U(b));
    if (op == 1) return T(U(a) * U(b));
  }
  return op == 0 ? a + b : op == 1 ? a * b : op == 2 ? (b > a ? b : a) : (b < a ? b : a);
}

// to = op over `from`, in the order of ranks.
template <class Value, class Element, class Widen, class Narrow>
void reduce(void* to, const std::vector<const char*>& from, std::size_t count, int op, Widen widen, Narrow narrow) {
  for (std::size_t i = 0; i < count; ++i) {
    Value value{};
    for (std::size_t rank = 0; rank < from.size(); ++rank) {
      const Value next = widen(reinterpret_cast<const Element*>(from[rank])[i]);
      value = rank == 0 ? next : combined<Value>(value, next, op);
    }
    static_cast<Element*>(to)[i] = narrow(value);
  }
}

template <class T>
void reduce(void* to, const std::vector<const char*>& from, std::size_t count, int op) {
  const auto same = [](T value) { return value; };
  reduce<T, T>(to, from, count, op, same, same);
}

constexpr int kTypes = 10;
std::size_t item_bytes(int dtype) { return std::size_t("\1\1\4\4\10\10\2\4\10\2"[dtype]); }

void reduce(void* to, const std::vector<const char*>& from, std::size_t count, int dtype, int op) {
  switch (dtype) {
    case 0:
      return reduce<std::int8_t>(to, from, count, op);
    case 1:
      return reduce<std::uint8_t>(to, from, count, op);
    case 2:
      return reduce<std::int32_t>(to, from, count, op);
    case 3:
      return reduce<std::uint32_t>(to, from, count, op);
    case 4:
      return reduce<std::int64_t>(to, from, count, op);
    case 5:
      return reduce<std::uint64_t>(to, from, count, op);
    case 6:
      return reduce<float, std::uint16_t>(to, from, count, op, half_to_float, float_to_half);
    case 7:
      return reduce<float>(to, from, count, op);
    case 8:
      return reduce<double>(to, from, count, op);
    default:
      return reduce<float, std::uint16_t>(to, from, count, op, bfloat_to_float, float_to_bfloat);
  }
}

struct Operation {
  Description description;
  const char* from;  // none: nothing is sent from here
  char* to;          // none: nothing is received here
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int size) : rank_(rank), size_(size) {
    if (Driver::get().pop(&context_) != 0) Driver::die("no context is current");
    Driver::get().push(context_);
  }
  ~Communicator() {
    if (meeting_ != nullptr) munmap(meeting_, sizeof(Meeting));
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  int state() const { return injected != kSuccess ? injected.load() : state_.load(); }

  void connect(Place place) {
    later([this, place] {
      if (!open(place)) return kSystem;
      meeting_->joined.fetch_add(1);
      meeting_->ring();
      const bool all_came = wait_until([&] { return meeting_->joined >= size_; });
      if (all_came && place.pid == getpid() && !meeting_->is_closed.exchange(true)) close(place.fd);
      return all_came ? kSuccess : kInternal;
    });
  }

  void enqueue(std::vector<Operation> operations, void* stream) {
    ++in_flight_;
    later([this, operations = std::move(operations), stream] {
      jitter();
      auto* run = new std::function<void()>([self = shared_from_this(), operations] {
        const std::lock_guard<std::mutex> lock(self->running_);
        for (const Operation& operation : operations) self->run(operation);
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

  void finalize() {
    later([this] { return wait_until([&] { return in_flight_ == 0; }) ? kSuccess : kInternal; });
  }

  void abort() {
    aborted_ = true;
    const std::lock_guard<std::mutex> lock(running_);  // nobody touches memory any more
  }

  void drain() {
    while (in_flight_ != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  // On a thread of its own; what it returns becomes the state.
  void later(std::function<Result()> work) {
    state_ = kInProgress;
    std::thread([self = shared_from_this(), work = std::move(work)] { self->state_ = work(); }).detach();
  }

  static void jitter() {
    const char* limit_us = std::getenv("GPUSIM_JITTER_US");
    if (limit_us == nullptr || std::atoi(limit_us) <= 0) return;
    thread_local std::minstd_rand random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % unsigned(std::atoi(limit_us))));
  }

  bool open(Place place) {
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
  bool wait_until(Condition condition) {
    while (!aborted_) {
      const std::uint32_t seen = meeting_->changes;
      if (condition()) return true;
      meeting_->sleep(seen);
    }
    return false;
  }

  void run(const Operation& operation) {
    const Description& what = operation.description;
    const std::size_t itemsize = item_bytes(what.dtype), step = kSlotBytes / itemsize;
    for (std::size_t begin = 0; begin < what.count && !aborted_; begin += step) {
      exchange(operation, begin * itemsize, std::min(step, what.count - begin));
    }
  }

  void exchange(const Operation& operation, std::size_t offset, std::size_t count) {
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

  bool receive(const Operation& operation, std::size_t offset, std::size_t count, std::uint64_t number) {
    const Description& what = operation.description;
    std::vector<const char*> data;
    for (int rank = 0; rank < size_; ++rank) {
      if (what.kind == kBroadcast && rank != what.root) continue;
      const Slot& slot = meeting_->slots[rank][number % kSlots];
      const bool is_there = wait_until([&] { return meeting_->progress[rank].posted >= number; });
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

  const int rank_, size_;
  void* context_ = nullptr;
  Meeting* meeting_ = nullptr;
  std::atomic<int> state_{kInProgress}, in_flight_{0};
  std::atomic<bool> aborted_{false};
  std::mutex running_;
  std::uint64_t pieces_ = 0;  // guarded by running_
};

// Those that have not been given back.
struct Living {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Communicator>> all;

  static Living& get() {
    static auto* living = new Living;
    return *living;
  }

  std::shared_ptr<Communicator> find(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto it = all.find(handle);
    if (it == all.end()) Driver::die("a communicator is used that there is not");
    return it->second;
  }

  std::shared_ptr<Communicator> remove(void* handle) {
    auto communicator = find(handle);
    const std::lock_guard<std::mutex> lock(mutex);
    all.erase(handle);
    return communicator;
  }
};

// What a thread has called since its outermost ncclGroupStart.
struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::shared_ptr<Communicator> communicator;
  void* stream = nullptr;
};
thread_local Group group;

Result start_group() {
  ++group.depth;
  return kSuccess;
}

Result end_group() {
  if (group.depth == 0) return kInvalidUsage;
  if (--group.depth > 0) return kSuccess;
  Group ended;
  std::swap(ended, group);
  if (ended.operations.empty()) return kSuccess;
  ended.communicator->enqueue(std::move(ended.operations), ended.stream);
  return kInProgress;
}

bool is_on_device(const void* memory) {
  int ordinal;
  constexpr int kDeviceOrdinal = 9;
  return Driver::get().attribute(&ordinal, kDeviceOrdinal, reinterpret_cast<unsigned long long>(memory)) == 0;
}

// `parts` of one call, each of `what` but for the root.
Result call(void* handle, void* stream, Description what, const void* from, void* to, std::vector<Operation> parts) {
  const auto communicator = Living::get().find(handle);
  if (communicator->state() != kSuccess) return kInvalidArgument;
  if (what.dtype < 0 || what.dtype >= kTypes || what.op < 0 || what.op > 3) return kInvalidArgument;
  if (what.root < 0 || what.root >= communicator->size()) return kInvalidArgument;
  if (what.count == 0) return kSuccess;
  if (!is_on_device(from) || !is_on_device(to)) return kInvalidArgument;
  if (group.communicator != nullptr && (group.communicator != communicator || group.stream != stream)) {
    return kInvalidUsage;  // more than hvdlite does
  }
  start_group();
  group.communicator = communicator;
  group.stream = stream;
  group.operations.insert(group.operations.end(), parts.begin(), parts.end());
  return end_group();
}

Operation reduce_operation(void* handle, Description what, const void* from, void* to) {
  what.kind = kReduceToRoot;
  const bool is_root = Living::get().find(handle)->rank() == what.root;
  return {what, static_cast<const char*>(from), is_root ? static_cast<char*>(to) : nullptr};
}

Operation broadcast_operation(void* handle, Description what, const void* from, void* to) {
  what.kind = kBroadcast;
  const bool is_root = Living::get().find(handle)->rank() == what.root;
  return {what, is_root ? static_cast<const char*>(from) : nullptr, static_cast<char*>(to)};
}

std::size_t block_bytes(const Description& what) {
  return what.dtype < 0 || what.dtype >= kTypes ? 0 : what.count * item_bytes(what.dtype);
}

}  // namespace

extern "C" {

struct UniqueId {
  char bytes[128];
};
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

// For tests: what every communicator of this process reports from now on.
void nccl_sim_fail(int result) { injected = result; }

int ncclGetVersion(int* version) {
  const char* set = std::getenv("GPUSIM_NCCL_VERSION");
  return *version = set == nullptr ? 22809 : std::atoi(set), kSuccess;
}
const char* ncclGetErrorString(int result) {
  const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                         "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return texts[result];
}
const char* ncclGetLastError(void*) { return "simulated"; }

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<std::uint64_t> made{0};
  const int file = memfd_create("nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return kSystem;
  const Place place{std::uint64_t(getpid()) << 32 | ++made, getpid(), file};
  if (pwrite(file, &place.nonce, sizeof place.nonce, 0) != sizeof place.nonce) return kSystem;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &place, sizeof place);
  return kSuccess;
}

int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, const Config* config) {
  constexpr unsigned kMagic = 0xcafebeef;
  if (config == nullptr || config->magic != kMagic || config->size < sizeof *config || config->blocking != 0) {
    return kInvalidArgument;
  }
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) return kInvalidArgument;
  Place place;
  std::memcpy(&place, &id, sizeof place);
  auto communicator = std::make_shared<Communicator>(rank, size);
  *handle = communicator.get();
  {
    const std::lock_guard<std::mutex> lock(Living::get().mutex);
    Living::get().all[*handle] = communicator;
  }
  communicator->connect(place);
  return kInProgress;
}

int ncclCommGetAsyncError(void* handle, int* error) { return *error = Living::get().find(handle)->state(), kSuccess; }
int ncclCommFinalize(void* handle) {
  const auto communicator = Living::get().find(handle);
  if (communicator->state() != kSuccess) return kInvalidArgument;
  return communicator->finalize(), kInProgress;
}
int ncclCommDestroy(void* handle) { return Living::get().remove(handle)->drain(), kSuccess; }
int ncclCommAbort(void* handle) { return Living::get().remove(handle)->abort(), kSuccess; }

int ncclGroupStart() { return start_group(); }
int ncclGroupEnd() { return end_group(); }

int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int op, void* handle, void* stream) {
  const Description what{kReduceToAll, dtype, op, 0, count};
  return call(handle, stream, what, from, to, {{what, static_cast<const char*>(from), static_cast<char*>(to)}});
}
int ncclReduce(const void* from, void* to, std::size_t count, int dtype, int op, int root, void* handle, void* stream) {
  const Description what{kReduceToRoot, dtype, op, root, count};
  return call(handle, stream, what, from, to, {reduce_operation(handle, what, from, to)});
}
int ncclBroadcast(const void* from, void* to, std::size_t count, int dtype, int root, void* handle, void* stream) {
  const Description what{kBroadcast, dtype, 0, root, count};
  return call(handle, stream, what, from, to, {broadcast_operation(handle, what, from, to)});
}
int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int op, void* handle, void* stream) {
  Description what{kReduceToRoot, dtype, op, 0, count};
  std::vector<Operation> parts;
  for (; what.root < Living::get().find(handle)->size(); ++what.root) {
    const char* block = static_cast<const char*>(from) + std::size_t(what.root) * block_bytes(what);
    parts.push_back(reduce_operation(handle, what, block, to));
  }
  what.root = 0;
  return call(handle, stream, what, from, to, std::move(parts));
}
int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, void* handle, void* stream) {
  Description what{kBroadcast, dtype, 0, 0, count};
  std::vector<Operation> parts;
  for (; what.root < Living::get().find(handle)->size(); ++what.root) {
    char* block = static_cast<char*>(to) + std::size_t(what.root) * block_bytes(what);
    parts.push_back(broadcast_operation(handle, what, from, block));
  }
  what.root = 0;
  return call(handle, stream, what, from, to, std::move(parts));
}
}
