// All memory that streams may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace gpusim {

using Address = std::uint64_t;

struct Block {
  enum class Kind {
    kDevice,      // cuMemAlloc
    kPinned,      // cuMemHostAlloc
    kRegistered,  // the program's own: cuMemHostRegister
    kMapped,      // cuMemMap
    kOpened,      // cuIpcOpenMemHandle
  };
  Kind kind;
  std::size_t nbytes;
  int ordinal;                // of the device whose it is; of the mapping process's, -1: not visible here
  std::uint64_t devices = 0;  // that may access it: bit by ordinal. All, but for what other processes share
  bool has_address = true;    // on devices as well
  Address begin = 0;          // set by `Memory::add`, as is the
  std::uint64_t id = 0;       // number that no other block ever has
};

class Memory {
 public:
  void add(Address begin, const Block& block);
  // False: no such block begins there.
  bool remove(Address begin, Block::Kind kind);
  void allow(Address begin, std::uint64_t devices);

  std::optional<Block> at(Address address);
  // From `begin` on, no byte of it in any block.
  bool is_free(Address begin, std::size_t nbytes);
  // Every byte is memory that the device may access; several mappings side by side count as one.
  bool may_access(Address begin, std::size_t nbytes, int ordinal);
  // When a stream comes to it: ends the process where it may not, as a device's behaviour is undefined.
  void require_access(const char* function, Address begin, std::size_t nbytes, int ordinal);

 private:
  std::optional<std::pair<Address, Block>> find(Address address);

  std::mutex mutex_;
  std::uint64_t made_ = 0;
  std::map<Address, Block> blocks_;
};

Memory& memory();

constexpr std::uint64_t kAllDevices = ~std::uint64_t{0};

// Memory whose bytes are 0xff, NaN in every floating type, with inaccessible pages behind it. 0: there is no more.
Address allocate(std::size_t nbytes);
// Of the page in which it is.
Address page_of(Address address);
// Nobody gets its addresses again: who uses it crashes.
void free_pages(Address begin, std::size_t nbytes);

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace gpusim
