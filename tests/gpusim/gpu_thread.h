// Which GPU thread calls a kernel of the host.
#pragma once

namespace gpusim {

// Makes this thread of the host a GPU thread until it becomes another one.
void become(unsigned thread, unsigned block, unsigned threads, unsigned blocks);

// What happens before every access of a GPU thread to memory; nullptr: nothing.
void on_access(void (*call)());

}  // namespace gpusim
