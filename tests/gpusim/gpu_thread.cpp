#include "gpu_thread.h"

#include "cuda/portable.h"

namespace gpusim {
namespace {

thread_local hvdlite::kernels::GpuThread current;
thread_local void (*before)() = nullptr;

}  // namespace

void become(unsigned thread, unsigned block, unsigned threads, unsigned blocks) {
  current = {thread, block, threads, blocks};
}

void on_access(void (*call)()) { before = call; }

}  // namespace gpusim

namespace hvdlite::kernels {

GpuThread this_thread() { return gpusim::current; }

void before_access() {
  if (gpusim::before != nullptr) gpusim::before();
}

}  // namespace hvdlite::kernels
