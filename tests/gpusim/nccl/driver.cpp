#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace nccl_sim {
namespace {

Driver load() {
  const char* path = std::getenv("GPUSIM_CUDA_LIBRARY");
  void* handle = dlopen(path == nullptr ? "" : path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) die("GPUSIM_CUDA_LIBRARY must name the simulated driver");
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) die(name);
  };
  Driver driver;
  find(driver.retain, "cuDevicePrimaryCtxRetain");
  find(driver.push, "cuCtxPushCurrent_v2");
  find(driver.pop, "cuCtxPopCurrent_v2");
  find(driver.attribute, "cuPointerGetAttribute");
  find(driver.launch, "cuLaunchHostFunc");
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = load();
  return driver;
}

std::optional<Allocation> allocation_at(const void* memory) {
  constexpr int kBufferId = 7, kOrdinal = 9, kIsLegacy = 10, kBegin = 11, kBytes = 12;
  const auto address = reinterpret_cast<unsigned long long>(memory);
  const auto ask = [&](int attribute, void* value) { return Driver::get().attribute(value, attribute, address) == 0; };
  int ordinal = 0, is_legacy = 0;
  Allocation found{};
  if (!ask(kOrdinal, &ordinal) || !ask(kIsLegacy, &is_legacy) || !ask(kBufferId, &found.id) ||
      !ask(kBegin, &found.begin) || !ask(kBytes, &found.nbytes)) {
    return std::nullopt;
  }
  found.is_virtual = is_legacy == 0;
  return found;
}

void die(const char* what) {
  std::fprintf(stderr, "nccl_sim: %s\n", what);
  std::abort();
}

}  // namespace nccl_sim
