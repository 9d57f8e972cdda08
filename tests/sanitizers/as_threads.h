// What programs are made of whose ranks are threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "signal.h"

namespace hvdlite {

using Cases = std::map<std::string, std::function<void()>>;

constexpr double kLongS = 60.0;  // never reached unless a case fails

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);  // the other ranks may wait for this one
}
#define REQUIRE(condition) require((condition), #condition)

inline void on_ranks(int size, const std::function<void(int)>& work) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.emplace_back(work, rank);
  for (std::thread& rank : ranks) rank.join();
}

template <class T>
std::uintptr_t address_of(const T* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

// Zeroed lines, as shared memory is.
class Lines {
 public:
  explicit Lines(std::size_t bytes) : lines_((bytes + kCacheLine - 1) / kCacheLine) {}
  std::uintptr_t address() const { return address_of(lines_.data()); }

 private:
  struct alignas(kCacheLine) Line {
    char bytes[kCacheLine];
  };
  std::vector<Line> lines_;
};

}  // namespace hvdlite
