// What the simulator does for itself, hidden from ThreadSanitizer: its locks and reference counts order nothing that
// CUDA would not order, so that a missing wait is a data race whatever the timing.
#pragma once

#include <mutex>

// Of ThreadSanitizer's runtime; null without it.
extern "C" {
__attribute__((weak)) void AnnotateIgnoreSyncBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreSyncEnd(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsEnd(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace gpusim {

class Unobserved {
 public:
  Unobserved() {
    if (AnnotateIgnoreSyncBegin == nullptr) return;
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unobserved() {
    if (AnnotateIgnoreSyncBegin == nullptr) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;
};

// A lock of the simulator's own.
class Locked {
 public:
  explicit Locked(std::mutex& mutex) : lock_(mutex) {}
  std::unique_lock<std::mutex>& lock() { return lock_; }

 private:
  Unobserved unobserved_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace gpusim
