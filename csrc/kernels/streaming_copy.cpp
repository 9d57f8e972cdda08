#include "kernels/streaming_copy.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace hvdlite {
namespace {

void plain_copy(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes) {
  if (bytes == 0) return;  // nothing has the address 0, which memcpy must not be given
  std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes);
}

}  // namespace

#ifdef __SSE2__

void streaming_copy(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes) {
  constexpr std::uint64_t kLine = 64;
  const std::uint64_t head = std::min<std::uint64_t>(bytes, (kLine - destination % kLine) % kLine);
  plain_copy(destination, source, head);
  std::uint64_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + done);
    auto* to = reinterpret_cast<__m128i*>(destination + done);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  plain_copy(destination + done, source + done, bytes - done);
  _mm_sfence();  // such stores are ordered with no others
}

#else

void streaming_copy(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes) {
  plain_copy(destination, source, bytes);
}

#endif

}  // namespace hvdlite
