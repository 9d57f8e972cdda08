// GPU threads that run at the same time, each a fiber.
#pragma once

#include <functional>

namespace gpusim {

// Runs `thread` as every thread of a grid. All are there from the beginning; `seed` chooses whose turn it is, and
// at which accesses to memory it ends. ThreadSanitizer is told that taking turns orders nothing.
void run_as_fibers(const std::function<void()>& thread, unsigned blocks, unsigned threads, unsigned seed);

}  // namespace gpusim
