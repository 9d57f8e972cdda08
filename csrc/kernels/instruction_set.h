// Which of the compiled paths the kernels take: chosen once, from the processor, never from the build machine.
#pragma once

#include <string>

#if defined(__x86_64__) && defined(__GNUC__)
#define HVDLITE_X86 1
#else
#define HVDLITE_X86 0
#endif

namespace hvdlite {

enum class InstructionSet { kPlain, kAvx2, kAvx512 };

// The widest one of this processor, unless `use_instruction_set` has named another.
InstructionSet instruction_set();
const char* instruction_set_name();

// To be called before any kernel runs. Throws std::invalid_argument unless `name` is plain, avx2 or avx512, and the
// processor has it.
void use_instruction_set(const std::string& name);

}  // namespace hvdlite
