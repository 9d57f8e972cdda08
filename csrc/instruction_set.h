// Which of the compiled paths the kernels take: chosen once, from the processor, never from the build machine.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define HVDLITE_X86 1
#else
#define HVDLITE_X86 0
#endif

namespace hvdlite {

enum class InstructionSet { kPlain, kAvx2, kAvx512 };

// The widest one of this processor, or what HVDLITE_INSTRUCTION_SET (plain, avx2, avx512) says; tests set it.
// Throws std::runtime_error where the processor lacks what the variable asks for.
InstructionSet instruction_set();
const char* instruction_set_name();

}  // namespace hvdlite
