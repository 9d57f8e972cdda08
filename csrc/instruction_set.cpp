#include "instruction_set.h"

#if HVDLITE_X86
#include <cpuid.h>
#endif

#include <stdexcept>

namespace hvdlite {
namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avx512"};

#if HVDLITE_X86
// Not every compiler's __builtin_cpu_supports knows F16C. It needs of the operating system what AVX2 needs.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

InstructionSet widest() {
#if HVDLITE_X86
  __builtin_cpu_init();
  // This asks the processor, and whether the operating system saves the registers.
  if (!__builtin_cpu_supports("avx2") || !has_f16c()) return InstructionSet::kPlain;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
#else
  return InstructionSet::kPlain;
#endif
}

InstructionSet& chosen() {
  static InstructionSet set = widest();
  return set;
}

}  // namespace

InstructionSet instruction_set() { return chosen(); }

const char* instruction_set_name() { return kNames[static_cast<int>(instruction_set())]; }

void use_instruction_set(const std::string& name) {
  const auto best = static_cast<int>(widest());
  for (int i = 0; i <= best; ++i) {
    if (name == kNames[i]) {
      chosen() = static_cast<InstructionSet>(i);
      return;
    }
  }
  throw std::invalid_argument("must be plain, avx2 or avx512, and at most " + std::string(kNames[best]) +
                              " on this processor");
}

}  // namespace hvdlite
