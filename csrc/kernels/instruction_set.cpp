#include "kernels/instruction_set.h"

#if HVDLITE_X86
#include <cpuid.h>
#endif

#include <stdexcept>

namespace hvdlite {
namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avx512"};

#if HVDLITE_X86
struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros where the processor does not have that leaf.
Registers cpuid(unsigned leaf) {
  Registers r;
  __get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool all(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Which registers the operating system saves, as XCR0 has it.
unsigned saved_registers() {
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

constexpr unsigned kSavesAvx = 0x06, kSavesAvx512 = 0xe6;
#endif

InstructionSet widest() {
#if HVDLITE_X86
  // __builtin_cpu_supports would do, but not every compiler's knows F16C, and that of Zig says no to everything.
  const Registers basic = cpuid(1), extended = cpuid(7);
  if (!all(basic.ecx, bit_OSXSAVE | bit_AVX | bit_F16C) || !all(extended.ebx, bit_AVX2)) return InstructionSet::kPlain;
  const unsigned saved = saved_registers();
  if (!all(saved, kSavesAvx)) return InstructionSet::kPlain;
  const bool avx512 =
      all(saved, kSavesAvx512) && all(extended.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
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
