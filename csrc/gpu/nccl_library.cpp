#include "gpu/nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <mutex>
#include <stdexcept>

namespace hvdlite::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";

std::mutex mutex;
std::unique_ptr<const Library> loaded;  // guarded by the mutex until it is set, and never changed afterwards

std::string& named() {
  static std::string path;
  return path;
}

std::string path_of(void* handle) {
  const link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return kName;
  return map->l_name;
}

void* open(const std::vector<std::string>& wheels) {
  void* there = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (!named().empty()) {
    // Its calls of its own functions must not end in the copy that is there.
    const int deep = there == nullptr ? 0 : RTLD_DEEPBIND;
    if (void* handle = dlopen(named().c_str(), RTLD_NOW | RTLD_LOCAL | deep)) return handle;
    throw std::runtime_error(std::string("HVDLITE_NCCL_LIBRARY: ") + dlerror());
  }
  if (there != nullptr) return there;
  for (const std::string& wheel : wheels) {
    if (void* handle = dlopen(wheel.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  if (void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL)) return handle;
  throw std::runtime_error(std::string("no NCCL: ") + dlerror());
}

void* symbol(void* handle, const char* name, const std::string& path) {
  void* function = dlsym(handle, name);
  if (function == nullptr) {
    throw std::runtime_error(path + " has no " + name + "; hvdlite needs NCCL " + version_name(kOldest) + " or later");
  }
  return function;
}

Library table_of(void* handle) {
  Library table{};
  table.path = path_of(handle);
#define HVDLITE_FIND(name, exported, result, parameters) \
  table.name = reinterpret_cast<result(*) parameters>(symbol(handle, #exported, table.path));
  HVDLITE_NCCL_FUNCTIONS(HVDLITE_FIND)
#undef HVDLITE_FIND
#define HVDLITE_FIND(name, exported, result, parameters) \
  table.name = reinterpret_cast<result(*) parameters>(dlsym(handle, #exported));
  HVDLITE_LATER_NCCL_FUNCTIONS(HVDLITE_FIND)
#undef HVDLITE_FIND
  if (table.version(&table.version_code) != kSuccess)
    throw std::runtime_error(table.path + " does not say its version");
  if (table.version_code < kOldest) {
    throw std::runtime_error(table.path + " is NCCL " + version_name(table.version_code) + "; hvdlite needs " +
                             version_name(kOldest) + " or later");
  }
  return table;
}

}  // namespace

const Library& load(const std::vector<std::string>& wheels) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) loaded = std::make_unique<const Library>(table_of(open(wheels)));
  return *loaded;
}

const Library& library() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) throw std::runtime_error("NCCL has not been loaded");
  return *loaded;
}

void use_library(const std::string& path) { named() = path; }

std::string version_name(int code) {
  const int unit = code < 10000 ? 1000 : 10000;  // of the major number; 2.8 and before have the smaller one
  return std::to_string(code / unit) + "." + std::to_string(code % unit / 100) + "." + std::to_string(code % 100);
}

void check(Result result, const char* what, Communicator communicator) {
  if (result == kSuccess || result == kInProgress) return;
  const Library& nccl = library();
  const char *text = nccl.error_text(result), *details = nccl.last_error(communicator);
  std::string message = std::string(what) + ": " + (text == nullptr ? std::to_string(result) : text);
  if (details != nullptr && *details != '\0') message += std::string(" (") + details + ")";
  throw std::runtime_error(message);
}

}  // namespace hvdlite::nccl
