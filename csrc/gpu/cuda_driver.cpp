#include "gpu/cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace hvdlite::cuda {
namespace {

std::string& library() {
  static std::string path;
  return path;
}

Driver load() {
  const std::string path = library().empty() ? "libcuda.so.1" : library();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
  Driver loaded{};
  const auto find = [&](const char* symbol) {
    void* function = dlsym(handle, symbol);
    if (function == nullptr) throw std::runtime_error(path + " has no " + symbol + "; the CUDA driver is too old");
    return function;
  };
#define HVDLITE_FIND(name, symbol, parameters) loaded.name = reinterpret_cast<Result(*) parameters>(find(#symbol));
  HVDLITE_CUDA_FUNCTIONS(HVDLITE_FIND)
#undef HVDLITE_FIND
#define HVDLITE_FIND(name, symbol, parameters) \
  loaded.name = reinterpret_cast<Result(*) parameters>(dlsym(handle, #symbol));
  HVDLITE_MULTICAST_FUNCTIONS(HVDLITE_FIND)
#undef HVDLITE_FIND
  const Result result = loaded.init(0);
  if (result != kSuccess) {
    const char* text = nullptr;
    loaded.error_text(result, &text);
    throw std::runtime_error(path + ": cuInit: " + (text == nullptr ? std::to_string(result) : text));
  }
  return loaded;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();  // tried again at the next call where it throws
  return loaded;
}

void use_library(const std::string& path) { library() = path; }

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  driver().error_name(result, &name);
  driver().error_text(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (name == nullptr ? std::to_string(result) : name) +
                           (text == nullptr ? "" : std::string(" (") + text + ")"));
}

}  // namespace hvdlite::cuda
