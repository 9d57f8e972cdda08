#include "settings.h"

#include <cstdlib>
#include <sstream>
#include <string>

namespace gpusim {
namespace {

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string(value) == "1";
}

int number(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

// As CUDA does: what comes after an index that is none does not count.
std::vector<int> visible(int count) {
  std::vector<int> devices;
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (chosen == nullptr) {
    for (int i = 0; i < count; ++i) devices.push_back(i);
    return devices;
  }
  std::istringstream list(chosen);
  for (std::string index; std::getline(list, index, ',');) {
    char* end = nullptr;
    const long device = std::strtol(index.c_str(), &end, 10);
    if (end == index.c_str() || *end != '\0' || device < 0 || device >= count) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

Settings read() {
  Settings found;
  found.devices = visible(number("GPUSIM_DEVICES", 1));
  found.peer = !is_set("GPUSIM_NO_PEER");
  found.virtual_memory = !is_set("GPUSIM_NO_VMM");
  found.files = !is_set("GPUSIM_NO_FILES");
  found.ipc = !is_set("GPUSIM_NO_IPC");
  found.multicast = !is_set("GPUSIM_NO_MULTICAST");
  if (const char* seed = std::getenv("GPUSIM_PCT")) found.pct = std::atoi(seed);
  found.room = number("GPUSIM_ROOM", 0);
  found.jitter_us = number("GPUSIM_JITTER_US", found.jitter_us);
  found.patience_us = number("GPUSIM_PATIENCE_US", found.patience_us);
  return found;
}

}  // namespace

const Settings& settings() {
  static const auto* read_once = new Settings(read());
  return *read_once;
}

}  // namespace gpusim
