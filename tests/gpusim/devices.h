// Devices, their contexts, and what every call needs.
#pragma once

#include "results.h"

namespace gpusim {

struct Stream;

// The primary context of a device, the only one it has. Lives to the end of the process.
struct Context {
  int ordinal;   // among those that this process sees
  int physical;  // in the machine
  Stream* legacy = nullptr;
};

Error initialize();
int device_count();
Context* context_of(int ordinal);  // null: no such device
int ordinal_of(int physical);      // -1: it is not visible here

Error push(Context* context);
Context* current();  // null: none
Error pop(Context** context);

// What is answered to calls that need no context: before cuInit, and from host functions, which may call nothing.
Error refusal_of_any_call();
// And to those that need one.
Error refusal();

// While it lives the thread executes a host function.
struct InHostFunction {
  InHostFunction();
  ~InHostFunction();
};

// Whether kernels of one device reach memory of another; by their numbers in the machine.
bool reaches(int physical, int physical_of_memory);

}  // namespace gpusim
