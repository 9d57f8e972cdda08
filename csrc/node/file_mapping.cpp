#include "node/file_mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace hvdlite {

void map_file(std::uintptr_t address, std::size_t bytes, int file, bool is_private) {
  const int flags = MAP_FIXED | (is_private ? MAP_PRIVATE : MAP_SHARED);
  if (mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, flags, file, 0) == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap");
  }
}

}  // namespace hvdlite
