// Streams of the ranks of a node that wait for one another, while their threads go on.
//
// Every rank has a word in a page of host memory that all of them map: how often its stream has come. Streams write and
// wait for these words by themselves. That the words are the host's lets a thread of any rank free streams whose peers
// will not come any more.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "gpu/device_stream.h"

namespace hvdlite {

class StreamBarrier {
 public:
  static std::size_t bytes_needed(int size);

  // `page`: zeroed, or with words that are alike, from which it goes on; of `bytes_needed`, the same memory in all
  // ranks. It and the stream must outlive this, the page also where `let_go` is false.
  StreamBarrier(const DeviceStream& stream, std::uintptr_t page, int rank, int size);
  ~StreamBarrier();
  StreamBarrier(const StreamBarrier&) = delete;
  StreamBarrier& operator=(const StreamBarrier&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const DeviceStream& stream() const { return stream_; }

  // What the stream does from now on comes after what the streams of all ranks did before they met.
  void meet();

  // Ranks that have not come as often as this one. From any thread, as `release`; neither waits for one that meets.
  std::vector<int> late() const;

  // For good: frees all streams that wait here, in all processes, and lets those go on that come. From any thread, by
  // every rank that lives. What streams do that have not met is undefined.
  void release() noexcept;

  // At the end, once: have the driver forget the page. False where it refuses, or the stream may still come to it:
  // after a failure the stream goes on with what it was given, once what it waits for has been done.
  bool let_go() noexcept;

 private:
  void write(std::uint32_t value);
  std::uint32_t load_word(int rank) const;
  std::uint32_t* word_of(int rank) const;
  cuda::Address address_of(int rank) const;

  const pid_t owner_ = getpid();
  const DeviceStream& stream_;
  std::uintptr_t page_;
  cuda::Address on_device_ = 0;  // of the page
  bool has_page_ = true;
  int rank_;
  int size_;
  std::mutex mutex_;  // guards the order in which values are written
  std::atomic<std::uint32_t> met_{0};
  std::atomic<bool> is_released_{false};
};

}  // namespace hvdlite
