#include "gpu/nccl_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "gpu/device_stream.h"
#include "gpu/nccl_library.h"
#include "waiting/without_signals.h"

namespace hvdlite {

using nccl::library;

namespace {

constexpr std::chrono::seconds kStuck(5);  // a call of NCCL that takes longer is what an abort is for; no busy machine
constexpr std::chrono::microseconds kFirstNap(5), kLongestNap(1000);

int dtype_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUint8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 4;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBfloat16:
      return 9;
    case DType::kInt16:
    case DType::kBool:
      break;
  }
  throw std::invalid_argument("NCCL does not reduce this type");
}

constexpr int kByte = 1;  // ncclUint8

// Memory that NCCL has been told of. NCCL fills the handles later than its calls return.
struct Registered {
  nccl::Window window = nullptr;
  void* buffer = nullptr;
  bool is_known = true;  // perhaps
};

int op_of(Op op) {
  switch (op) {
    case Op::kSum:
      return 0;
    case Op::kProduct:
      return 1;
    case Op::kMax:
      return 2;
    case Op::kMin:
      return 3;
  }
  throw std::invalid_argument("NCCL does not have this reduction");
}

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
cuda::Stream stream_of(std::uintptr_t handle) { return reinterpret_cast<cuda::Stream>(handle); }

}  // namespace

struct NcclCommunicator::State : std::enable_shared_from_this<State> {
  using GiveBack = nccl::Result (*)(nccl::Communicator);

  const cuda::Context context;
  const pid_t owner = getpid();
  // Set before `give_back` asks for `calling`: whoever has that later sees it. Looks without the lock only end waits.
  std::atomic<bool> ended{false};
  std::mutex calling;  // who calls NCCL with the communicator
  nccl::Communicator communicator = nullptr;

  std::mutex turn;                   // of a call, until NCCL has completed it
  std::list<Registered> registered;  // guarded by the turn, but for what NCCL fills

  std::mutex mutex;
  std::condition_variable given_back;
  bool is_begun = false, is_given_back = false;  // guarded by the mutex

  explicit State(cuda::Context it) : context(it) {}

  // `call(communicator)` while nobody gives it back; false once that has begun.
  template <class Call>
  bool use(Call call) {
    const std::lock_guard<std::mutex> lock(calling);
    if (ended) return false;
    const cuda::Current current(context);
    call(communicator);
    return true;
  }

  // By `how`, the first time that it is called, on a thread of its own, since NCCL may not return.
  void begin_to_give_back(GiveBack how) noexcept try {
    if (getpid() != owner) return;  // a forked child has none of NCCL's threads
    const std::lock_guard<std::mutex> lock(mutex);
    ended = true;
    if (is_begun) return;
    is_begun = true;
    const WithoutSignals inherited;
    std::thread([self = shared_from_this(), how] { self->give_back(how); }).detach();
  } catch (const std::system_error&) {  // no thread: it stays with NCCL
  }

  void give_back(GiveBack how) {
    std::unique_lock<std::mutex> lock(calling, std::try_to_lock);
    for (const auto limit = Clock::now() + kStuck; !lock && Clock::now() < limit;) {
      std::this_thread::sleep_for(kLongestNap);
      static_cast<void>(lock.try_lock());
    }
    if (communicator != nullptr) {
      const cuda::Current current(context);
      how(communicator);
    }
    const std::lock_guard<std::mutex> done(mutex);
    is_given_back = true;
    given_back.notify_all();
  }

  // False where NCCL still knows it. For whose turn it is.
  bool deregister(Registered& memory) {
    if (!memory.is_known) return true;
    use([&](nccl::Communicator it) {
      nccl::Result state = nccl::kSuccess;
      const bool is_ready = library().async_error(it, &state) == nccl::kSuccess && state == nccl::kSuccess;
      if (!is_ready) return;
      nccl::Result result = nccl::kSuccess;
      if (memory.window != nullptr) result = library().window_deregister(it, memory.window);
      if (memory.buffer != nullptr) result = library().buffer_deregister(it, memory.buffer);
      memory.is_known = result != nccl::kSuccess;
    });
    return !memory.is_known;
  }

  // Returns once NCCL knows it no more: where it cannot be told, that is when the communicator has been given back.
  void forget(Registered& memory) {
    {
      const std::lock_guard<std::mutex> lock(turn);
      if (deregister(memory)) {
        registered.remove_if([&](const Registered& each) { return &each == &memory; });
        return;
      }
    }
    std::unique_lock<std::mutex> lock(mutex);
    given_back.wait(lock, [this] { return is_given_back; });
  }

  bool wait_until_given_back(Clock::time_point until) {
    std::unique_lock<std::mutex> lock(mutex);
    return given_back.wait_until(lock, until, [this] { return is_given_back; });
  }
};

std::string NcclCommunicator::unique_id(int device) {
  const cuda::Current current(primary_context(device));
  nccl::UniqueId id;
  nccl::check(library().unique_id(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

NcclCommunicator::NcclCommunicator(int device, const std::string& unique_id, int rank, int size)
    : device_(device), rank_(rank), state_(std::make_shared<State>(primary_context(device))) {
  nccl::UniqueId id;
  if (unique_id.size() != sizeof id.bytes) throw std::invalid_argument("NcclCommunicator: not an id of NCCL's");
  std::memcpy(id.bytes, unique_id.data(), sizeof id.bytes);
  nccl::Config config;
  const cuda::Current current(state_->context);
  const nccl::Result result = library().init(&state_->communicator, size, id, rank, &config);
  try {
    nccl::check(result, "ncclCommInitRankConfig", state_->communicator);
  } catch (const std::runtime_error&) {
    abort();  // one that does not connect any more has threads and sockets all the same
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  abort();
  if (getpid() == state_->owner) state_->wait_until_given_back(Clock::now() + std::chrono::seconds(1));
}

template <class Done>
WaitStatus NcclCommunicator::until(double timeout_s, Done done) {
  const auto limit = time_after(timeout_s);
  auto nap = kFirstNap;
  while (true) {
    if (done()) return WaitStatus::kOk;
    if (state_->ended) return WaitStatus::kAborted;
    if (Clock::now() >= limit) return WaitStatus::kTimeout;
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
}

WaitStatus NcclCommunicator::settle(double timeout_s) {
  return until(timeout_s, [this] {
    nccl::Result state = nccl::kInProgress;
    state_->use([&](nccl::Communicator communicator) {
      nccl::check(library().async_error(communicator, &state), "ncclCommGetAsyncError", communicator);
      nccl::check(state, "NCCL", communicator);
    });
    return state == nccl::kSuccess;
  });
}

template <class Call>
WaitStatus NcclCommunicator::enqueue(const char* what, std::uintptr_t stream, double timeout_s, Call call) {
  const std::lock_guard<std::mutex> turn(state_->turn);
  last_stream_ = stream;
  return complete(what, timeout_s, call);
}

template <class Call>
WaitStatus NcclCommunicator::complete(const char* what, double timeout_s, Call call) {
  const bool called =
      state_->use([&](nccl::Communicator communicator) { nccl::check(call(communicator), what, communicator); });
  return called ? settle(timeout_s) : WaitStatus::kAborted;
}

WaitStatus NcclCommunicator::all_reduce(std::uintptr_t address, std::uint64_t numel, DType dtype, Op op,
                                        std::uintptr_t stream, double timeout_s) {
  return enqueue("ncclAllReduce", stream, timeout_s, [&](nccl::Communicator communicator) {
    return library().all_reduce(at(address), at(address), numel, dtype_of(dtype), op_of(op), communicator,
                                stream_of(stream));
  });
}

WaitStatus NcclCommunicator::reduce_scatter(std::uintptr_t address, std::uint64_t block_numel, DType dtype, Op op,
                                            std::uintptr_t stream, double timeout_s) {
  const std::uintptr_t own = address + rank_ * block_numel * item_bytes(dtype);
  return enqueue("ncclReduceScatter", stream, timeout_s, [&](nccl::Communicator communicator) {
    return library().reduce_scatter(at(address), at(own), block_numel, dtype_of(dtype), op_of(op), communicator,
                                    stream_of(stream));
  });
}

WaitStatus NcclCommunicator::all_gather(std::uintptr_t address, std::uint64_t block_nbytes, std::uintptr_t stream,
                                        double timeout_s) {
  const std::uintptr_t own = address + rank_ * block_nbytes;
  return enqueue("ncclAllGather", stream, timeout_s, [&](nccl::Communicator communicator) {
    return library().all_gather(at(own), at(address), block_nbytes, kByte, communicator, stream_of(stream));
  });
}

namespace {

// `call(part)` for each as one group, which is ended whatever happens.
template <class Call>
nccl::Result grouped(const NcclCommunicator::Parts& parts, Call call) {
  nccl::Result result = library().group_start();
  if (result != nccl::kSuccess) return result;
  for (const auto& [address, count, root] : parts) {
    result = call(at(address), count, root);
    if (result != nccl::kSuccess && result != nccl::kInProgress) break;
    result = nccl::kSuccess;
  }
  const nccl::Result end = library().group_end();
  return result == nccl::kSuccess ? end : result;
}

}  // namespace

WaitStatus NcclCommunicator::reduce(const Parts& parts, DType dtype, Op op, std::uintptr_t stream, double timeout_s) {
  const int type = dtype_of(dtype), operation = op_of(op);
  return enqueue("ncclReduce", stream, timeout_s, [&](nccl::Communicator communicator) {
    return grouped(parts, [&](void* memory, std::uint64_t numel, int root) {
      return library().reduce(memory, memory, numel, type, operation, root, communicator, stream_of(stream));
    });
  });
}

WaitStatus NcclCommunicator::broadcast(const Parts& parts, std::uintptr_t stream, double timeout_s) {
  return enqueue("ncclBroadcast", stream, timeout_s, [&](nccl::Communicator communicator) {
    return grouped(parts, [&](void* memory, std::uint64_t nbytes, int root) {
      return library().broadcast(memory, memory, nbytes, kByte, root, communicator, stream_of(stream));
    });
  });
}

WaitStatus NcclCommunicator::wait(std::uintptr_t stream, double timeout_s) {
  const Moment end(device_, stream);
  return until(timeout_s, [&] {
    const std::string problem = error();
    if (!problem.empty()) throw std::runtime_error(problem);
    return end.is_reached() && !state_->ended;  // an abort lets the stream go on with what is undefined
  });
}

std::string NcclCommunicator::error() {
  std::string problem;
  state_->use([&](nccl::Communicator communicator) {
    try {
      nccl::Result state = nccl::kSuccess;
      nccl::check(library().async_error(communicator, &state), "ncclCommGetAsyncError", communicator);
      nccl::check(state, "NCCL", communicator);
    } catch (const std::runtime_error& failure) {
      problem = failure.what();
    }
  });
  return problem;
}

void NcclCommunicator::abort() { state_->begin_to_give_back(library().abort); }

std::pair<WaitStatus, Registration> NcclCommunicator::register_memory(DeviceSegment& segment, std::size_t place,
                                                                      double timeout_s) {
  if (!segment.is_for_nccl()) return {WaitStatus::kOk, Registration::kNone};
  const nccl::Library& nccl = library();
  void* const memory = at(segment.copies().at(place));
  const std::size_t nbytes = segment.copy_bytes();
  const std::lock_guard<std::mutex> turn(state_->turn);
  Registered& registered = state_->registered.emplace_back();
  segment.before_unmapping([state = state_, &registered] { state->forget(registered); });
  WaitStatus status = WaitStatus::kOk;
  if (nccl.window_register != nullptr && nccl.window_deregister != nullptr) {
    status = complete("ncclCommWindowRegister", timeout_s, [&](nccl::Communicator communicator) {
      return nccl.window_register(communicator, memory, nbytes, &registered.window, nccl::kSymmetric);
    });
    if (registered.window != nullptr) return {status, Registration::kWindow};
  }
  if (status == WaitStatus::kOk && nccl.buffer_register != nullptr && nccl.buffer_deregister != nullptr) {
    status = complete("ncclCommRegister", timeout_s, [&](nccl::Communicator communicator) {
      return nccl.buffer_register(communicator, memory, nbytes, &registered.buffer);
    });
    if (registered.buffer != nullptr) return {status, Registration::kBuffer};
  }
  return {status, Registration::kNone};
}

// Memory is deregistered after the last work on it, and before NCCL ends its threads, which have a part in it.
WaitStatus NcclCommunicator::finish(double timeout_s) {
  const WaitStatus status = last_stream_ == 0 ? WaitStatus::kOk : wait(last_stream_, timeout_s);
  if (status != WaitStatus::kOk) return status;
  const std::lock_guard<std::mutex> turn(state_->turn);
  for (Registered& memory : state_->registered) state_->deregister(memory);
  return complete("ncclCommFinalize", timeout_s, library().finalize);
}

bool NcclCommunicator::close(double timeout_s) {
  const auto limit = time_after(timeout_s);
  bool is_finished = false;
  try {
    is_finished = finish(timeout_s) == WaitStatus::kOk;
  } catch (const std::runtime_error&) {  // there is nothing to finish any more
  }
  state_->begin_to_give_back(is_finished ? library().destroy : library().abort);
  return state_->wait_until_given_back(std::max(limit, Clock::now() + kStuck));
}

}  // namespace hvdlite
