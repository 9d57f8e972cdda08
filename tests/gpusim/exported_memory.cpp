#include <cstring>

#include "exported.h"
#include "ipc_memory.h"
#include "memory.h"
#include "unobserved.h"
#include "usable_stream.h"

namespace hvdlite::cuda {

using namespace gpusim;
using Kind = Block::Kind;

namespace {

constexpr std::size_t kWord = sizeof(std::uint32_t);

Result take(Address* address, std::size_t n, Kind kind) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_NEEDS_NO_CAPTURE;
  GPUSIM_REQUIRE(n != 0, INVALID_VALUE);
  *address = allocate(n);
  GPUSIM_REQUIRE(*address != 0, OUT_OF_MEMORY);
  memory().add(*address, {kind, n, current()->ordinal, kAllDevices});
  return SUCCESS;
}

Result give(Address address, Kind kind) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_NEEDS_NO_CAPTURE;
  const auto block = memory().at(address);
  GPUSIM_REQUIRE(memory().remove(address, kind), INVALID_VALUE);
  ipc_memory().withdraw(address);
  free_pages(address, block->nbytes);
  return SUCCESS;
}

// Of a word that streams write and wait for.
bool is_word(const gpusim::Stream& stream, Address address) {
  const auto block = memory().at(address);
  return address % kWord == 0 && block && block->has_address &&
         memory().may_access(address, kWord, stream.context->ordinal);
}

}  // namespace

Result cuMemAlloc_v2(Address* address, std::size_t n) { return take(address, n, Kind::kDevice); }

Result cuMemFree_v2(Address address) { return give(address, Kind::kDevice); }

Result cuMemHostAlloc(void** host, std::size_t n, unsigned) {
  Address address = 0;
  const Result result = take(&address, n, Kind::kPinned);
  return *host = pointer<void>(address), result;
}

Result cuMemFreeHost(void* host) { return give(reinterpret_cast<Address>(host), Kind::kPinned); }

Result cuMemHostRegister_v2(void* host, std::size_t n, unsigned flags) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_REQUIRE(n != 0 && (flags & ~(kHostRegisterPortable | kHostRegisterDeviceMap)) == 0, INVALID_VALUE);
  const auto begin = reinterpret_cast<Address>(host);
  GPUSIM_REQUIRE(memory().is_free(begin, n), HOST_MEMORY_ALREADY_REGISTERED);
  const bool has_address = (flags & kHostRegisterDeviceMap) != 0;
  const int ordinal = current()->ordinal;
  const auto devices = (flags & kHostRegisterPortable) != 0 ? kAllDevices : std::uint64_t{1} << ordinal;
  memory().add(begin, {Kind::kRegistered, n, ordinal, devices, has_address});
  return SUCCESS;
}

Result cuMemHostUnregister(void* host) {
  GPUSIM_NEEDS_CONTEXT;
  const bool was = memory().remove(reinterpret_cast<Address>(host), Kind::kRegistered);
  return was ? SUCCESS : HOST_MEMORY_NOT_REGISTERED;
}

Result cuMemHostGetDevicePointer_v2(Address* address, void* host, unsigned flags) {
  GPUSIM_NEEDS_CONTEXT;
  *address = reinterpret_cast<Address>(host);
  const auto block = memory().at(*address);
  const bool is_host = block && (block->kind == Kind::kPinned || block->kind == Kind::kRegistered);
  return is_host && block->has_address && flags == 0 ? SUCCESS : INVALID_VALUE;
}

Result cuMemcpyAsync(Address to, Address from, std::size_t n, Stream stream) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  const int ordinal = used->context->ordinal;
  for (const Address address : {to, from}) GPUSIM_REQUIRE(memory().may_access(address, n, ordinal), INVALID_VALUE);
  used->push([=] {
    for (const Address address : {to, from}) memory().require_access("cuMemcpyAsync", address, n, ordinal);
    std::memmove(pointer<void>(to), pointer<void>(from), n);
  });
  return SUCCESS;
}

Result cuMemsetD8Async(Address to, unsigned char value, std::size_t n, Stream stream) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  const int ordinal = used->context->ordinal;
  GPUSIM_REQUIRE(memory().may_access(to, n, ordinal), INVALID_VALUE);
  used->push([=] {
    memory().require_access("cuMemsetD8Async", to, n, ordinal);
    std::memset(pointer<void>(to), value, n);
  });
  return SUCCESS;
}

Result cuStreamWriteValue32_v2(Stream stream, Address address, std::uint32_t value, unsigned flags) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  GPUSIM_REQUIRE(flags == 0 && is_word(*used, address), INVALID_VALUE);
  const int ordinal = used->context->ordinal;
  used->push([=] {
    memory().require_access("cuStreamWriteValue32", address, kWord, ordinal);
    __atomic_store_n(pointer<std::uint32_t>(address), value, __ATOMIC_RELEASE);
  });
  return SUCCESS;
}

Result cuStreamWaitValue32_v2(Stream stream, Address address, std::uint32_t value, unsigned flags) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  GPUSIM_REQUIRE(flags == kWaitGeq && is_word(*used, address), INVALID_VALUE);
  const int ordinal = used->context->ordinal;
  used->push([] {},
             [=] {
               memory().require_access("cuStreamWaitValue32", address, kWord, ordinal);
               const auto found = __atomic_load_n(pointer<std::uint32_t>(address), __ATOMIC_ACQUIRE);
               return static_cast<std::int32_t>(found - value) >= 0;
             });
  return SUCCESS;
}

Result cuPointerGetAttribute(void* value, int attribute, Address address) {
  constexpr int kMemoryType = 2, kHost = 1, kDevice = 2, kBufferId = 7, kOrdinal = 9;
  constexpr int kIsLegacy = 10, kBegin = 11, kBytes = 12;
  GPUSIM_NEEDS_NO_CONTEXT;
  const auto block = memory().at(address);
  GPUSIM_REQUIRE(block, INVALID_VALUE);
  const bool is_device = block->kind != Kind::kPinned && block->kind != Kind::kRegistered;
  if (attribute == kMemoryType) return *static_cast<unsigned*>(value) = is_device ? kDevice : kHost, SUCCESS;
  if (attribute == kBufferId) return *static_cast<std::uint64_t*>(value) = block->id, SUCCESS;
  if (attribute == kIsLegacy) return *static_cast<int*>(value) = block->kind != Kind::kMapped, SUCCESS;
  if (attribute == kBegin) return *static_cast<Address*>(value) = block->begin, SUCCESS;
  if (attribute == kBytes) return *static_cast<std::size_t*>(value) = block->nbytes, SUCCESS;
  GPUSIM_REQUIRE(attribute == kOrdinal && block->ordinal >= 0, INVALID_VALUE);
  return *static_cast<int*>(value) = block->ordinal, SUCCESS;
}

}  // namespace hvdlite::cuda
