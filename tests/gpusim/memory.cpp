#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "results.h"
#include "unobserved.h"

namespace gpusim {
namespace {

constexpr std::size_t kPage = 4096, kAlignment = 256;

std::size_t rounded_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

void Memory::add(Address begin, const Block& block) {
  const Locked locked(mutex_);
  Block& added = blocks_[begin] = block;
  added.begin = begin;
  added.id = ++made_;
}

bool Memory::remove(Address begin, Block::Kind kind) {
  const Locked locked(mutex_);
  const auto found = blocks_.find(begin);
  if (found == blocks_.end() || found->second.kind != kind) return false;
  blocks_.erase(found);
  return true;
}

void Memory::allow(Address begin, std::uint64_t devices) {
  const Locked locked(mutex_);
  blocks_.at(begin).devices |= devices;
}

std::optional<Block> Memory::at(Address address) {
  const Locked locked(mutex_);
  const auto found = find(address);
  return found ? std::optional<Block>(found->second) : std::nullopt;
}

bool Memory::is_free(Address begin, std::size_t nbytes) {
  const Locked locked(mutex_);
  const auto next = blocks_.lower_bound(begin);
  return !find(begin) && (next == blocks_.end() || next->first >= begin + nbytes);
}

bool Memory::may_access(Address begin, std::size_t nbytes, int ordinal) {
  const Locked locked(mutex_);
  const Address end = begin + nbytes;
  for (bool is_first = true; is_first || begin < end; is_first = false) {
    const auto found = find(begin);
    if (!found || !(found->second.devices >> ordinal & 1)) return false;
    if (!is_first && found->second.kind != Block::Kind::kMapped) return false;
    begin = found->first + found->second.nbytes;
  }
  return true;
}

void Memory::require_access(const char* function, Address begin, std::size_t nbytes, int ordinal) {
  if (may_access(begin, nbytes, ordinal)) return;
  die("%s: %zu bytes at %#zx are no longer memory of device %d when the stream comes to it", function, nbytes,
      static_cast<std::size_t>(begin), ordinal);
}

std::optional<std::pair<Address, Block>> Memory::find(Address address) {
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return std::nullopt;
  const auto& [begin, block] = *--after;
  if (address >= begin + block.nbytes) return std::nullopt;
  return std::pair(begin, block);
}

Address page_of(Address address) { return address / kPage * kPage; }

// The memory ends where its pages end, as far as its alignment allows.
Address allocate(std::size_t nbytes) {
  const Unobserved unobserved;
  const std::size_t size = rounded_up(nbytes, kAlignment), pages = rounded_up(size, kPage);
  void* all = mmap(nullptr, pages + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED || mprotect(all, pages, PROT_READ | PROT_WRITE) != 0) return 0;
  std::memset(all, 0xff, pages);
  return reinterpret_cast<Address>(all) + pages - size;
}

void free_pages(Address begin, std::size_t nbytes) {
  const Address from = page_of(begin);
  const std::size_t pages = rounded_up(begin + nbytes - from, kPage);
  mmap(pointer<void>(from), pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace gpusim
