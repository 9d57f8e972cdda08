#include "devices.h"

#include <atomic>
#include <vector>

#include "settings.h"

namespace gpusim {
namespace {

std::atomic<bool> is_initialized{false};
thread_local bool in_host_function = false;
thread_local std::vector<Context*> contexts;

std::vector<Context*>& all() {
  static auto* made = [] {
    auto* found = new std::vector<Context*>;
    for (int physical : settings().devices) found->push_back(new Context{static_cast<int>(found->size()), physical});
    return found;
  }();
  return *made;
}

bool is_known(Context* context) {
  for (Context* known : all()) {
    if (known == context) return true;
  }
  return false;
}

}  // namespace

Error initialize() {
  if (all().empty()) return NO_DEVICE;
  is_initialized.store(true, std::memory_order_relaxed);
  return SUCCESS;
}

int device_count() { return static_cast<int>(all().size()); }

Context* context_of(int ordinal) { return ordinal < 0 || ordinal >= device_count() ? nullptr : all()[ordinal]; }

int ordinal_of(int physical) {
  for (const Context* context : all()) {
    if (context->physical == physical) return context->ordinal;
  }
  return -1;
}

Error push(Context* context) {
  if (!is_known(context)) return INVALID_CONTEXT;
  contexts.push_back(context);
  return SUCCESS;
}

Context* current() { return contexts.empty() ? nullptr : contexts.back(); }

Error pop(Context** context) {
  *context = current();
  if (*context == nullptr) return INVALID_CONTEXT;
  contexts.pop_back();
  return SUCCESS;
}

Error refusal_of_any_call() {
  if (in_host_function) return NOT_PERMITTED;
  return is_initialized.load(std::memory_order_relaxed) ? SUCCESS : NOT_INITIALIZED;
}

Error refusal() {
  if (const Error refused = refusal_of_any_call()) return refused;
  return current() == nullptr ? INVALID_CONTEXT : SUCCESS;
}

InHostFunction::InHostFunction() { in_host_function = true; }
InHostFunction::~InHostFunction() { in_host_function = false; }

bool reaches(int physical, int physical_of_memory) { return physical == physical_of_memory || settings().peer; }

}  // namespace gpusim
