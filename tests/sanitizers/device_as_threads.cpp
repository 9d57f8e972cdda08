// What hvdlite asks of a GPU, on the simulated driver, whose streams are threads: an event that is not waited for is a
// data race, whatever the timing.
//
// device_as_threads DRIVER CASE exits with 0, or says on stderr what failed; without a case it names all.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "device_copies.h"

namespace {

using namespace hvdlite;

constexpr int kNumel = 1000;
constexpr std::size_t kBytes = kNumel * sizeof(int);

void require(bool holds, const char* what) {
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
    cuda::check(cuda::driver().stream_create(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
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

std::uintptr_t address_of(const int* data) { return reinterpret_cast<std::uintptr_t>(data); }

// A kernel makes a gradient; it travels to the host, is reduced there, travels back, and another kernel reads it.
void round_trips(const User& user, bool waits) {
  int* gradient = user.allocate();
  const PinnedMemory pinned(0, kBytes);
  auto* host = reinterpret_cast<int*>(pinned.address());
  DeviceCopies copies(0);
  for (int turn = 0; turn < 20; ++turn) {
    user.launch([=] {
      for (int i = 0; i < kNumel; ++i) gradient[i] = turn + i;
    });
    {
      const Moment moment(0, user.handle());
      copies.run(waits ? std::vector<const Moment*>{&moment} : std::vector<const Moment*>{},
                 {{pinned.address(), address_of(gradient), kBytes}});
    }
    for (int i = 0; i < kNumel; ++i) {
      REQUIRE(!waits || host[i] == turn + i);
      host[i] *= 2;
    }
    copies.run({}, {{address_of(gradient), pinned.address(), kBytes}});
    user.launch([=] {
      for (int i = 0; i < kNumel; ++i) REQUIRE(!waits || gradient[i] == 2 * (turn + i));
    });
  }
  user.synchronize();
}

// Two streams of the user make parts of one bucket.
void two_streams(const User& first, const User& second) {
  int *one = first.allocate(), *other = second.allocate();
  const PinnedMemory pinned(0, 2 * kBytes);
  auto* host = reinterpret_cast<int*>(pinned.address());
  DeviceCopies copies(0);
  for (int turn = 0; turn < 20; ++turn) {
    first.launch([=] { one[7] = turn; });
    second.launch([=] { other[7] = -turn; });
    const Moment of_first(0, first.handle()), of_second(0, second.handle());
    copies.run({&of_first, &of_second}, {{pinned.address(), address_of(one), kBytes},
                                         {pinned.address() + kBytes, address_of(other), kBytes}});
    REQUIRE(host[7] == turn && host[kNumel + 7] == -turn);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::map<std::string, std::function<void()>> cases{
      {"round trips", [&] { round_trips(User(arguments[1]), true); }},
      {"two streams", [&] { two_streams(User(arguments[1]), User(arguments[1])); }},
      {"race", [&] { round_trips(User(arguments[1]), false); }},
  };
  if (count < 3) {
    for (const auto& [name, run] : cases) std::printf("%s\n", name.c_str());
    return 0;
  }
  cuda::use_library(arguments[1]);
  cases.at(arguments[2])();
  std::_Exit(0);  // streams are threads that never end
}
