#include "gpu/stream_barrier.h"

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "kernels/elements.h"

namespace hvdlite {

using cuda::check;
using cuda::driver;

namespace {

// Beyond all that is waited for by half of what a comparison by difference can tell apart.
constexpr std::uint32_t kForGood = 1u << 30;

constexpr std::chrono::seconds kLastUse(1);
constexpr std::chrono::milliseconds kNap(1);

// Whether the stream has done all that it was given; where the driver is gone, nobody does anything any more.
bool comes_to_an_end(const DeviceStream& stream) noexcept try {
  const Moment end(stream.device(), reinterpret_cast<std::uintptr_t>(stream.handle()));
  for (const auto limit = std::chrono::steady_clock::now() + kLastUse; !end.is_reached();) {
    if (std::chrono::steady_clock::now() >= limit) return false;
    std::this_thread::sleep_for(kNap);
  }
  return true;
} catch (const std::runtime_error&) {
  return true;
}

}  // namespace

std::size_t StreamBarrier::bytes_needed(int size) { return static_cast<std::size_t>(size) * kCacheLine; }

StreamBarrier::StreamBarrier(const DeviceStream& stream, std::uintptr_t page, int rank, int size)
    : stream_(stream), page_(page), rank_(rank), size_(size) {
  const cuda::Current current(stream_.context());
  auto* memory = reinterpret_cast<void*>(page);
  check(driver().host_register(memory, bytes_needed(size), cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap),
        "cuMemHostRegister");
  const cuda::Result result = driver().host_address(&on_device_, memory, 0);
  if (result != cuda::kSuccess) driver().host_unregister(memory);
  check(result, "cuMemHostGetDevicePointer");
  met_ = load_word(rank_);
}

StreamBarrier::~StreamBarrier() { let_go(); }

bool StreamBarrier::let_go() noexcept {
  if (!std::exchange(has_page_, false)) return true;
  if (getpid() != owner_ || !comes_to_an_end(stream_)) return false;  // a forked child's is its parent's
  const cuda::Current current(stream_.context(), std::nothrow);
  return driver().host_unregister(reinterpret_cast<void*>(page_)) == cuda::kSuccess;
}

void StreamBarrier::meet() {
  const cuda::Current current(stream_.context());
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_released_) return;
  ++met_;
  // It is enqueued before the waits: the driver does not know that they belong together, and may have put this stream
  // and another one, for which a peer waits, into one queue.
  write(met_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    check(driver().stream_wait_value(stream_.handle(), address_of(peer), met_, cuda::kWaitGeq), "cuStreamWaitValue32");
  }
}

std::vector<int> StreamBarrier::late() const {
  std::vector<int> ranks;
  const std::uint32_t own = load_word(rank_);
  for (int rank = 0; rank < size_; ++rank) {
    if (static_cast<std::int32_t>(load_word(rank) - own) < 0) ranks.push_back(rank);
  }
  return ranks;
}

void StreamBarrier::release() noexcept {
  if (is_released_.exchange(true)) return;
  // Before anything that may have to wait: a thread that meets has the lock, and the driver keeps it until the stream,
  // which has no room for more, goes on. Released: whoever finds that a stream went on finds as well why it was freed,
  // which was written before.
  for (int rank = 0; rank < size_; ++rank) {
    __atomic_store_n(word_of(rank), met_ + kForGood, __ATOMIC_RELEASE);
  }
  const cuda::Current current(stream_.context(), std::nothrow);
  const std::lock_guard<std::mutex> lock(mutex_);
  // After what the stream has yet to write, which would make the word small again. Where the driver refuses, the GPU
  // has failed, and its streams write nothing any more.
  driver().stream_write_value(stream_.handle(), address_of(rank_), met_ + kForGood, 0);
}

// After all that the stream has done so far, which whoever sees the value sees as well: without
// CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER.
void StreamBarrier::write(std::uint32_t value) {
  check(driver().stream_write_value(stream_.handle(), address_of(rank_), value, 0), "cuStreamWriteValue32");
}

// Relaxed: threads compare words, and read nothing because of them; what streams wait for they load by themselves.
std::uint32_t StreamBarrier::load_word(int rank) const { return __atomic_load_n(word_of(rank), __ATOMIC_RELAXED); }

std::uint32_t* StreamBarrier::word_of(int rank) const {
  return reinterpret_cast<std::uint32_t*>(page_ + static_cast<std::size_t>(rank) * kCacheLine);
}

cuda::Address StreamBarrier::address_of(int rank) const {
  return on_device_ + static_cast<std::size_t>(rank) * kCacheLine;
}

}  // namespace hvdlite
