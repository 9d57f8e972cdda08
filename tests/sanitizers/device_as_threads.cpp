// What hvdlite asks of a GPU, on the simulated driver, whose streams are threads: an event that is not waited for is a
// data race, whatever the timing.
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device_user.h"
#include "gpu/device_copies.h"

namespace {

using namespace hvdlite;

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
      copies
          .begin(waits ? std::vector<const Moment*>{&moment} : std::vector<const Moment*>{},
                 {{pinned.address(), address_of(gradient), kBytes}})
          ->wait();
    }
    for (int i = 0; i < kNumel; ++i) {
      REQUIRE(!waits || host[i] == turn + i);
      host[i] *= 2;
    }
    copies.begin({}, {{address_of(gradient), pinned.address(), kBytes}})->wait();
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
    copies
        .begin({&of_first, &of_second},
               {{pinned.address(), address_of(one), kBytes}, {pinned.address() + kBytes, address_of(other), kBytes}})
        ->wait();
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
  return run_case(count, arguments, cases);
}
