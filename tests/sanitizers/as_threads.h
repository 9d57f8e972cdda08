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

#include "waiting/signal.h"

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

// An abort word and a barrier.
class Page {
 public:
  explicit Page(int size) : size_(size), lines_(kCacheLine + Barrier::bytes_needed(size)) {}

  Barrier barrier(int rank, int spin_us) const {
    return {lines_.address() + kCacheLine, rank, size_, abort_address(), spin_us};
  }
  std::uintptr_t abort_address() const { return lines_.address(); }
  Word& barrier_word() const { return atomic_at<std::uint32_t>(lines_.address() + kCacheLine); }

 private:
  int size_;
  Lines lines_;
};

// What a rank gives to a sum.
inline float value_of(int rank, std::uint64_t i) {
  return static_cast<float>((i + 3 * static_cast<std::uint64_t>(rank)) % 11);
}

inline float sum_of(int size, std::uint64_t i) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value_of(rank, i);
  return sum;
}

}  // namespace hvdlite
