// The memory that a communicator has been told of. Who breaks a rule that NCCL relies on ends the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace nccl_sim {

enum class Kind { kBuffer, kWindow };

class RegisteredMemory {
 public:
  // Whether NCCL takes it: whole pages of memory that cuMemCreate has made.
  static bool is_fit(const void* begin, std::size_t nbytes);
  // That this process has registered now.
  static int count(Kind kind);

  // The handle. No memory may be registered twice.
  void* add(const void* begin, std::size_t nbytes, Kind kind);
  // Once, after the last use, and before it is unmapped.
  void remove(void* handle, Kind kind);

  // Which registration has the address, and where in it; alike on ranks that pass the same place of memory that they
  // have registered in the same order. -1: none has it.
  std::int64_t place_of(const void* address);
  void begin_use(std::int64_t place);
  void end_use(std::int64_t place);

  void require_none();
  // All of it is still mapped, and from now on it may be unmapped.
  void abandon();

 private:
  struct Entry {
    std::uint64_t begin, nbytes, allocation;
    Kind kind;
    int users;
  };

  static void require_mapped(const Entry& entry);

  std::mutex mutex_;
  std::int64_t made_ = 0;
  std::map<std::int64_t, Entry> entries_;  // by number
};

}  // namespace nccl_sim
