#include "registered_memory.h"

#include <atomic>

#include "driver.h"

namespace nccl_sim {
namespace {

constexpr int kOffsetBits = 40;  // of a place
constexpr std::uint64_t kPage = std::uint64_t{2} << 20;

std::atomic<int> registered[2];

std::uint64_t number_of(const void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

}  // namespace

bool RegisteredMemory::is_fit(const void* begin, std::size_t nbytes) {
  const auto allocation = allocation_at(begin);
  return allocation && allocation->is_virtual && number_of(begin) % kPage == 0 && nbytes % kPage == 0 && nbytes != 0 &&
         number_of(begin) + nbytes <= allocation->begin + allocation->nbytes;
}

int RegisteredMemory::count(Kind kind) { return registered[static_cast<int>(kind)]; }

void* RegisteredMemory::add(const void* begin, std::size_t nbytes, Kind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t address = number_of(begin);
  for (const auto& [number, entry] : entries_) {
    if (address < entry.begin + entry.nbytes && entry.begin < address + nbytes) die("memory is registered twice");
  }
  const auto allocation = allocation_at(begin);
  if (!allocation) die("memory is registered that there is not");
  entries_[++made_] = {address, nbytes, allocation->id, kind, 0};
  ++registered[static_cast<int>(kind)];
  return reinterpret_cast<void*>(made_);
}

void RegisteredMemory::remove(void* handle, Kind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(reinterpret_cast<std::int64_t>(handle));
  if (found == entries_.end() || found->second.kind != kind) die("memory is deregistered that is not registered");
  require_mapped(found->second);
  if (found->second.users != 0) die("memory is deregistered that an operation uses");
  entries_.erase(found);
  --registered[static_cast<int>(kind)];
}

std::int64_t RegisteredMemory::place_of(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, entry] : entries_) {
    const std::uint64_t offset = number_of(address) - entry.begin;
    if (offset >= entry.nbytes) continue;
    require_mapped(entry);
    return number << kOffsetBits | static_cast<std::int64_t>(offset);
  }
  return -1;
}

void RegisteredMemory::begin_use(std::int64_t place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (place >= 0) ++entries_.at(place >> kOffsetBits).users;
}

void RegisteredMemory::end_use(std::int64_t place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(place >> kOffsetBits);
  if (found != entries_.end()) --found->second.users;  // it may have been abandoned
}

void RegisteredMemory::require_none() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!entries_.empty()) die("a communicator is destroyed that has registered memory");
}

void RegisteredMemory::abandon() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, entry] : entries_) {
    require_mapped(entry);
    --registered[static_cast<int>(entry.kind)];
  }
  entries_.clear();
}

void RegisteredMemory::require_mapped(const Entry& entry) {
  const auto allocation = allocation_at(reinterpret_cast<const void*>(entry.begin));
  if (!allocation || allocation->id != entry.allocation) die("memory was unmapped while it was registered");
}

}  // namespace nccl_sim
