// A stream of ours on a GPU, and points in streams of the user's.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/cuda_driver.h"

namespace hvdlite {

// The context that torch uses as well, kept to the end of the process: the driver may be gone before our destructors.
cuda::Context primary_context(int device);

// A point in a stream: all that was enqueued before it has happened once it is reached.
class Moment {
 public:
  // Of `stream`, now; `is_timed` if `seconds_since` will be asked for. Throws std::runtime_error, also where the stream
  // is being captured into a graph.
  Moment(int device, std::uintptr_t stream, bool is_timed = false);
  ~Moment();
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

  // What is enqueued on `stream` from now on comes after it. Throws as the constructor.
  void precede(std::uintptr_t stream) const;
  bool is_reached() const;
  // Sleeps until it is reached; other threads may enqueue meanwhile.
  void wait() const;
  // Of the device's time; both are timed, and reached. To half a microsecond, or a part in 10 million.
  double seconds_since(const Moment& earlier) const;

  cuda::Event event() const { return event_; }

 private:
  cuda::Context context_;
  cuda::Event event_ = nullptr;
};

// One of ours is waited for by who says so only, not even by the legacy default stream.
class DeviceStream {
 public:
  explicit DeviceStream(int device);
  // A stream of somebody else, who keeps it.
  DeviceStream(int device, std::uintptr_t stream);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  int device() const { return device_; }
  cuda::Context context() const { return context_; }
  cuda::Stream handle() const { return stream_; }

  // What is enqueued from now on comes after all of `moments`.
  void follow(const std::vector<const Moment*>& moments) const;

 private:
  int device_;
  cuda::Context context_;
  cuda::Stream stream_ = nullptr;
  bool is_ours_ = true;
};

}  // namespace hvdlite
