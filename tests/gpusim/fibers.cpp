// To be compiled without sanitizers: what a scheduler does is no race of a kernel.
#include "fibers.h"

#include <ucontext.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gpu_thread.h"

// Of the sanitizers' runtimes; null without.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, std::size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** stack, std::size_t* bytes);
}

namespace gpusim {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr unsigned kTsanOrdersNothing = 1;

// Whoever runs: a GPU thread, or the host.
struct Running {
  ucontext_t context;
  void* tsan = nullptr;
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
};

// The caller goes on when somebody switches back to it.
void switch_to(Running& next, Running& self, bool ends) {
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(next.tsan, kTsanOrdersNothing);
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack, next.stack, next.stack_bytes);
  }
  swapcontext(&self.context, &next.context);
  if (__sanitizer_finish_switch_fiber != nullptr) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

struct Fiber : Running {
  unsigned index, block;
  bool ended = false;
  std::unique_ptr<char[]> memory{new char[kStackBytes]};
};

class Grid {
 public:
  Grid(const std::function<void()>& thread, unsigned blocks, unsigned threads, unsigned seed)
      : thread_(thread), blocks_(blocks), threads_(threads), random_(seed + 1) {
    if (__tsan_get_current_fiber != nullptr) host_.tsan = __tsan_get_current_fiber();
    for (unsigned block = 0; block < blocks; ++block) {
      for (unsigned index = 0; index < threads; ++index) add(block, index);
    }
  }

  void run() {
    if (__tsan_release != nullptr) __tsan_release(&launch_);
    running_ = this;
    on_access([] { running_->yield(); });
    std::vector<Fiber*> alive;
    for (Fiber& fiber : fibers_) alive.push_back(&fiber);
    while (!alive.empty()) {
      Fiber*& chosen = alive[random_() % alive.size()];
      now_ = chosen;
      become(now_->index, now_->block, threads_, blocks_);
      switch_to(*now_, host_, false);
      if (now_->ended) {
        std::swap(chosen, alive.back());
        alive.pop_back();
      }
    }
    on_access(nullptr);
    if (__tsan_acquire != nullptr) __tsan_acquire(&end_);
    for (Fiber& fiber : fibers_) {
      if (fiber.tsan != nullptr) __tsan_destroy_fiber(fiber.tsan);
    }
  }

 private:
  void add(unsigned block, unsigned index) {
    Fiber& fiber = fibers_.emplace_back();
    fiber.block = block;
    fiber.index = index;
    fiber.stack = fiber.memory.get();
    fiber.stack_bytes = kStackBytes;
    if (__tsan_create_fiber != nullptr) fiber.tsan = __tsan_create_fiber(0);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.memory.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, [] { running_->work(); }, 0);
  }

  // A launch comes after what the host has done before, and what the host does next after the end.
  void work() {
    if (__sanitizer_finish_switch_fiber != nullptr) {
      __sanitizer_finish_switch_fiber(nullptr, &host_.stack, &host_.stack_bytes);
    }
    if (__tsan_acquire != nullptr) __tsan_acquire(&launch_);
    thread_();
    if (__tsan_release != nullptr) __tsan_release(&end_);
    now_->ended = true;
    switch_to(host_, *now_, true);
  }

  void yield() {
    if (random_() % 4 == 0) switch_to(host_, *now_, false);
  }

  static thread_local Grid* running_;
  const std::function<void()>& thread_;
  unsigned blocks_, threads_;
  std::minstd_rand random_;
  Running host_;
  std::deque<Fiber> fibers_;
  Fiber* now_ = nullptr;
  char launch_ = 0, end_ = 0;  // addresses by which ThreadSanitizer knows them
};

thread_local Grid* Grid::running_ = nullptr;

}  // namespace

void run_as_fibers(const std::function<void()>& thread, unsigned blocks, unsigned threads, unsigned seed) {
  Grid(thread, blocks, threads, seed).run();
}

}  // namespace gpusim
