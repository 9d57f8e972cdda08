// Communicators of NCCL in threads, on the simulated NCCL and driver: what is called while another thread aborts, and
// what a stream orders, under ThreadSanitizer.
//
// nccl_as_threads DRIVER NCCL CASE exits with 0, or says on stderr what failed; without a case it names all.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/cuda_driver.h"
#include "gpu/device_stream.h"
#include "gpu/file_segment.h"
#include "gpu/nccl_communicator.h"
#include "gpu/nccl_library.h"

namespace {

using namespace hvdlite;

constexpr int kRanks = 2, kNumel = 5000;
constexpr double kPatienceS = 60;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}
#define REQUIRE(condition) require((condition), #condition)

// One rank: its stream and memory, and kernels that a user would launch there.
class Rank {
 public:
  Rank(void* driver, const std::string& id, int rank) : driver_(driver), stream_(0), nccl(0, id, rank, kRanks) {
    const cuda::Current current(stream_.context());
    unsigned long long address = 0;
    const auto allocate = find<int(unsigned long long*, std::size_t)>("cuMemAlloc_v2");
    REQUIRE(allocate(&address, kNumel * sizeof(int)) == 0);
    data = reinterpret_cast<int*>(address);
    REQUIRE(nccl.settle(kPatienceS) == WaitStatus::kOk);
  }

  void launch(std::function<void()> kernel) const {
    const auto call = [](void* argument) {
      const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(argument));
      (*owned)();
    };
    void (*callback)(void*) = call;
    const cuda::Current current(stream_.context());
    const auto launch_function = find<int(cuda::Stream, void (*)(void*), void*)>("cuLaunchHostFunc");
    REQUIRE(launch_function(stream_.handle(), callback, new std::function<void()>(std::move(kernel))) == 0);
  }

  WaitStatus all_reduce() {
    return nccl.all_reduce(reinterpret_cast<std::uintptr_t>(data), kNumel, DType::kInt32, Op::kSum, handle(),
                           kPatienceS);
  }

  WaitStatus wait() { return nccl.wait(handle(), kPatienceS); }

 private:
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(driver_, name));
  }

  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(stream_.handle()); }

  void* driver_;
  DeviceStream stream_;

 public:
  int* data;
  NcclCommunicator nccl;
};

void on_all_ranks(void* driver, const std::function<void(Rank&)>& program) {
  const std::string id = NcclCommunicator::unique_id(0);
  std::vector<std::thread> threads;
  for (int number = 0; number < kRanks; ++number) {
    threads.emplace_back([&, number] {
      Rank rank(driver, id, number);
      program(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A kernel makes what is summed, and another one reads the sum, with nothing but the stream between them.
void streams(void* driver) {
  on_all_ranks(driver, [](Rank& rank) {
    for (int turn = 0; turn < 20; ++turn) {
      rank.launch([&rank, turn] { rank.data[kNumel - 1] = turn; });
      REQUIRE(rank.all_reduce() == WaitStatus::kOk);
      rank.launch([&rank, turn] { REQUIRE(rank.data[kNumel - 1] == kRanks * turn); });
    }
    REQUIRE(rank.wait() == WaitStatus::kOk);
    REQUIRE(rank.nccl.close(kPatienceS));
  });
}

// While one thread calls, another one aborts.
void aborts(void* driver) {
  for (int pause_us = 0; pause_us < 2000; pause_us += 100) {
    on_all_ranks(driver, [pause_us](Rank& rank) {
      std::thread messenger([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
        rank.nccl.abort();
      });
      while (rank.all_reduce() == WaitStatus::kOk && rank.nccl.error().empty() && rank.wait() == WaitStatus::kOk) {
      }
      messenger.join();
      REQUIRE(rank.nccl.close(kPatienceS));
    });
  }
}

// While one thread calls, another one deregisters memory that was dropped, and unmaps it.
void drops(void* driver) {
  on_all_ranks(driver, [](Rank& rank) {
    for (int turn = 0; turn < 10; ++turn) {
      FileSegment dropped(0, 1);
      dropped.map({""}, {-1}, 0);
      REQUIRE(rank.nccl.register_memory(dropped, 0, kPatienceS) == std::pair(WaitStatus::kOk, Registration::kWindow));
      REQUIRE(rank.all_reduce() == WaitStatus::kOk);
    }
    REQUIRE(rank.wait() == WaitStatus::kOk);
    REQUIRE(rank.nccl.close(kPatienceS));
  });
}

// The host reads what a stream writes.
void race(void* driver) {
  on_all_ranks(driver, [](Rank& rank) {
    REQUIRE(rank.all_reduce() == WaitStatus::kOk);
    std::fprintf(stderr, "%d\n", rank.data[kNumel - 1]);
    REQUIRE(rank.wait() == WaitStatus::kOk);
  });
}

}  // namespace

int main(int count, char** arguments) {
  const std::map<std::string, void (*)(void*)> cases{
      {"streams", streams}, {"aborts", aborts}, {"drops", drops}, {"race", race}};
  if (count < 4) {
    for (const auto& [name, run] : cases) std::printf("%s\n", name.c_str());
    return 0;
  }
  setenv("GPUSIM_CUDA_LIBRARY", arguments[1], 1);
  cuda::use_library(arguments[1]);
  nccl::use_library(arguments[2]);
  nccl::load({});
  cases.at(arguments[3])(dlopen(arguments[1], RTLD_NOW));
  std::_Exit(0);  // streams are threads that never end
}
