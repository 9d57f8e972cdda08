// The environment, read by cuInit.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace gpusim {

struct Settings {
  // GPUSIM_DEVICES of them are in the machine (1); CUDA_VISIBLE_DEVICES, a list of indexes, chooses some.
  std::vector<int> devices;
  bool peer = true;             // GPUSIM_NO_PEER: no device reaches another one's memory
  bool virtual_memory = true;   // GPUSIM_NO_VMM: there is no cuMemCreate
  bool files = true;            // GPUSIM_NO_FILES: nothing is exported as a file descriptor, whatever devices say
  bool ipc = true;              // GPUSIM_NO_IPC: there is no cuIpcGetMemHandle
  bool multicast = true;        // GPUSIM_NO_MULTICAST: no device has it
  std::optional<unsigned> pct;  // GPUSIM_PCT, a seed: one at a time, by random priorities (scheduler.h)
  std::size_t room = 0;         // GPUSIM_ROOM: tasks in a stream, for more of which who enqueues waits (no limit)
  int jitter_us = 0;            // GPUSIM_JITTER_US: streams come late by up to so much
  int patience_us = 2000;       // GPUSIM_PATIENCE_US: see scheduler.h
};

const Settings& settings();

}  // namespace gpusim
