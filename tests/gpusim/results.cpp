#include "results.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace gpusim {

void die(const char* format, ...) {
  std::fputs("gpusim: ", stderr);
  std::va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace gpusim
