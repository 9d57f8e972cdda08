#include "gpu_thread.h"

#include "cuda/portable.h"

namespace gpusim {
namespace {

thread_local hvdlite::kernels::GpuThread running;
thread_local void (*before)() = nullptr;

}  // namespace

void become(unsigned thread, unsigned block, unsigned threads, unsigned blocks) {
  running = {thread, block, threads, blocks};
}

void on_access(void (*call)()) { before = call; }

}  // namespace gpusim

namespace hvdlite::kernels {

GpuThread this_thread() { return gpusim::running; }

void before_access() {
  if (gpusim::before != nullptr) gpusim::before();
}

}  // namespace hvdlite::kernels
