// A file in place of a range of memory that is mapped already.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvdlite {

// Maps `bytes` of the file from its beginning at `address`, readable and writable, in place of what was there. A
// private mapping has the file's bytes until it is written to, a page at a time, and what is written there stays in
// this process. Throws std::system_error.
void map_file(std::uintptr_t address, std::size_t bytes, int file, bool is_private);

}  // namespace hvdlite
