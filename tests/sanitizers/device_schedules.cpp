// Two mistakes that timing nearly always hides, on the simulated driver: with the mistake the result is wrong by some
// schedules (GPUSIM_PCT=seed), without it by none.
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "device_user.h"

namespace {

using namespace hvdlite;
using cuda::check;
using cuda::driver;

constexpr int kSteps = 12;

cuda::Address address_of(const int* data) { return reinterpret_cast<cuda::Address>(data); }

cuda::Event new_event() {
  cuda::Event event;
  check(driver().event_create(&event, cuda::kEventDisableTiming), "cuEventCreate");
  return event;
}

void record(cuda::Event event, const User& user) { check(driver().event_record(event, user.stream), "cuEventRecord"); }

void wait(const User& user, cuda::Event event) {
  check(driver().stream_wait_event(user.stream, event, 0), "cuStreamWaitEvent");
}

void copy(int* to, const int* from, const User& user) {
  check(driver().copy(address_of(to), address_of(from), kBytes, user.stream), "cuMemcpyAsync");
}

void set_all(int* data, int value) {
  for (int i = 0; i < kNumel; ++i) data[i] = value;
}

// Gradients travel to the host by one stream and back by another, through two slots of pinned memory in turn.
void two_slots(const char* library, bool waits_for_the_slot) {
  const User down(library), up(library);
  int* slots[2];
  for (int*& slot : slots) {
    void* memory;
    check(driver().host_alloc(&memory, kBytes, cuda::kHostAllocPortable), "cuMemHostAlloc");
    slot = static_cast<int*>(memory);
  }
  std::vector<int*> gradients, results;
  std::vector<cuda::Event> returned;
  for (int step = 0; step < kSteps; ++step) {
    int* slot = slots[step % 2];
    int* gradient = gradients.emplace_back(down.allocate());
    int* result = results.emplace_back(up.allocate());
    const cuda::Event arrived = new_event();
    down.launch([=] { set_all(gradient, step); });
    if (waits_for_the_slot && step >= 2) wait(down, returned[step - 2]);
    copy(slot, gradient, down);
    record(arrived, down);
    wait(up, arrived);
    copy(result, slot, up);
    record(returned.emplace_back(new_event()), up);
  }
  up.synchronize();
  for (int step = 0; step < kSteps; ++step) REQUIRE(results[step][kNumel / 2] == step);
}

// The thread that computes tells another one that a gradient is under way; that one has it copied.
void hand_over(const char* library, bool records_first) {
  const User compute(library);
  std::vector<int*> gradients, results;
  std::vector<cuda::Event> ready;
  for (int step = 0; step < kSteps; ++step) {
    gradients.push_back(compute.allocate());
    results.push_back(compute.allocate());
    ready.push_back(new_event());
  }
  std::atomic<int> handed_over{0};
  std::thread coordinator([&] {
    const User communication(library);
    for (int step = 0; step < kSteps; ++step) {
      while (handed_over.load(std::memory_order_acquire) <= step) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      wait(communication, ready[step]);
      copy(results[step], gradients[step], communication);
    }
    communication.synchronize();
  });
  for (int step = 0; step < kSteps; ++step) {
    int* gradient = gradients[step];
    compute.launch([=] { set_all(gradient, step); });
    if (records_first) record(ready[step], compute);
    handed_over.store(step + 1, std::memory_order_release);
    if (!records_first) record(ready[step], compute);
  }
  coordinator.join();
  for (int step = 0; step < kSteps; ++step) REQUIRE(results[step][kNumel / 2] == step);
}

// Which stream has come when, for two runs to be compared.
void order(const char* library) {
  const User first(library), second(library), third(library);
  for (int step = 0; step < kSteps; ++step) {
    for (const auto& [name, user] : {std::pair("a", &first), std::pair("b", &second), std::pair("c", &third)}) {
      user->launch([name = name] { std::printf("%s", name); });
    }
  }
  for (const User* user : {&first, &second, &third}) user->synchronize();
  std::printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  const char* library = count > 1 ? arguments[1] : "";
  return run_case(count, arguments,
                  {{"two slots", [=] { two_slots(library, true); }},
                   {"two slots, race", [=] { two_slots(library, false); }},
                   {"hand over", [=] { hand_over(library, true); }},
                   {"hand over, race", [=] { hand_over(library, false); }},
                   {"order", [=] { order(library); }}});
}
