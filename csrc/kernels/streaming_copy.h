// Copies what is too large for the caches.
#pragma once

#include <cstdint>

namespace hvdlite {

// As memcpy, but the destination does not pass through the caches: its lines are not read before they are written, and
// push nothing out. The regions do not overlap.
void streaming_copy(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes);

}  // namespace hvdlite
