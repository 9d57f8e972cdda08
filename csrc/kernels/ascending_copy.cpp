#include "kernels/ascending_copy.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/elements.h"

#define HVDLITE_KERNELS "ascending_copy_kernels.h"
#include "kernels/for_each_instruction_set.h"

namespace hvdlite {
namespace {

using CopyKernel = void (*)(char* destination, const char* source, std::uint64_t bytes);

CopyKernel find_kernel() {
  switch (instruction_set()) {
#if HVDLITE_X86
    case InstructionSet::kAvx512:
      return avx512::copy_lines;
    case InstructionSet::kAvx2:
      return avx2::copy_lines;
#endif
    default:
      return plain::copy_lines;
  }
}

}  // namespace

void ascending_copy(std::uintptr_t destination, std::uintptr_t source, std::uint64_t bytes) {
  static const CopyKernel kernel = find_kernel();
  kernel(reinterpret_cast<char*>(destination), reinterpret_cast<const char*>(source), bytes);
}

}  // namespace hvdlite
