// Numbers below the smallest normal one are computed with as they are, whatever the program has asked of its threads.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hvdlite {

// While this lives its thread flushes none of them to zero. torch.set_flush_denormal is for a thread and those that it
// starts, so of two ranks that reduce the same numbers one would do so and the other would not.
class WithSubnormals {
 public:
  WithSubnormals() : before_(control()) {
    if ((before_ & kFlushes) != 0) set_control(before_ & ~kFlushes);
  }
  ~WithSubnormals() {
    if ((before_ & kFlushes) != 0) set_control(before_);
  }
  WithSubnormals(const WithSubnormals&) = delete;
  WithSubnormals& operator=(const WithSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  using Control = unsigned;
  static constexpr Control kFlushes = 0x8040;  // results, and operands
  static Control control() { return _mm_getcsr(); }
  static void set_control(Control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Control = std::uint64_t;
  static constexpr Control kFlushes = 1 << 24;
  static Control control() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set_control(Control control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  using Control = unsigned;
  static constexpr Control kFlushes = 0;
  static Control control() { return 0; }
  static void set_control(Control) {}
#endif

  Control before_;
};

}  // namespace hvdlite
