// What programs on the simulated driver are made of.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "gpu/cuda_driver.h"

namespace hvdlite {

constexpr int kNumel = 1000;
constexpr std::size_t kBytes = kNumel * sizeof(int);

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}
#define REQUIRE(condition) require((condition), #condition)

// What a user's program calls, and hvdlite does not.
struct User {
  explicit User(const char* driver) : library(dlopen(driver, RTLD_NOW)) {
    cuda::Device device;
    cuda::check(cuda::driver().device_get(&device, 0), "cuDeviceGet");
    cuda::check(cuda::driver().retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    cuda::check(cuda::driver().push_context(context), "cuCtxPushCurrent");
    cuda::check(cuda::driver().stream_create(&stream, cuda::kStreamNonBlocking, 0), "cuStreamCreateWithPriority");
  }

  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library, name));
  }

  int* allocate() const {
    unsigned long long address = 0;
    REQUIRE(find<int(unsigned long long*, std::size_t)>("cuMemAlloc_v2")(&address, kBytes) == 0);
    return reinterpret_cast<int*>(address);
  }

  void launch(std::function<void()> kernel) const {
    const auto call = [](void* argument) {
      auto* function = static_cast<std::function<void()>*>(argument);
      (*function)();
      delete function;
    };
    void (*callback)(void*) = call;
    auto* argument = new std::function<void()>(std::move(kernel));
    REQUIRE(find<int(cuda::Stream, void (*)(void*), void*)>("cuLaunchHostFunc")(stream, callback, argument) == 0);
  }

  void synchronize() const { REQUIRE(find<int(cuda::Stream)>("cuStreamSynchronize")(stream) == 0); }
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(stream); }

  void* library;
  cuda::Context context = nullptr;
  cuda::Stream stream = nullptr;
};

// PROGRAM DRIVER CASE exits with 0, or says on stderr what failed; without a case it names all.
inline int run_case(int count, char** arguments, const std::map<std::string, std::function<void()>>& cases) {
  if (count < 3) {
    for (const auto& [name, run] : cases) std::printf("%s\n", name.c_str());
    return 0;
  }
  cuda::use_library(arguments[1]);
  cases.at(arguments[2])();
  std::fflush(stdout);
  std::_Exit(0);  // streams are threads that never end
}

}  // namespace hvdlite
