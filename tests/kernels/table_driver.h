// A CUDA driver that is nothing but a table: one device, whose kernels run at once, in the call that launches them.
#pragma once

#include <functional>

namespace table_driver {

struct Launch {
  std::function<void()> thread;  // what each GPU thread does
  unsigned blocks;
  unsigned threads;
};

// What a launch does from now on.
void on_launch(std::function<void(const Launch&)> run);

}  // namespace table_driver
