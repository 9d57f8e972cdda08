// A communicator of NCCL whose calls end, whatever becomes of the other ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/device_memory.h"
#include "kernels/elements.h"
#include "waiting/signal.h"

namespace hvdlite {

// How NCCL works on memory: by way of memory of its own, or in place.
enum class Registration { kNone, kBuffer, kWindow };

// One rank's end of it. Collectives are enqueued on a stream of the caller's and reduce or fill memory in place; each
// call returns once its work is in the stream, which is before it has been done.
//
// A call that returns kTimeout or kAborted, or throws std::runtime_error with NCCL's reason, leaves the communicator
// fit for `abort` and `close` only. One thread calls, but for `abort`.
//
// Memory that is registered stays so until it is dropped, or the communicator is closed. It is unmapped when NCCL knows
// it no more: after an abort, when NCCL has let go of the communicator.
class NcclCommunicator {
 public:
  // [address, numel or bytes, root] each.
  using Parts = std::vector<std::tuple<std::uintptr_t, std::uint64_t, int>>;

  // What one rank makes and all ranks pass to the constructor. `nccl::load` has been called.
  static std::string unique_id(int device);

  // Begins to connect; `settle` waits for the other ranks.
  NcclCommunicator(int device, const std::string& unique_id, int rank, int size);
  // Aborts what has not been closed; waits for that for a second at most.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Returns once what has been begun is connected or in its stream.
  WaitStatus settle(double timeout_s);

  WaitStatus all_reduce(std::uintptr_t address, std::uint64_t numel, DType, Op, std::uintptr_t stream,
                        double timeout_s);
  // Block r of `size` equal ones ends on rank r.
  WaitStatus reduce_scatter(std::uintptr_t address, std::uint64_t block_numel, DType, Op, std::uintptr_t stream,
                            double timeout_s);
  // Block r of `size` equal ones is that of rank r.
  WaitStatus all_gather(std::uintptr_t address, std::uint64_t block_nbytes, std::uintptr_t stream, double timeout_s);
  // Each part on its root; elements.
  WaitStatus reduce(const Parts& parts, DType, Op, std::uintptr_t stream, double timeout_s);
  // Each part from its root; bytes.
  WaitStatus broadcast(const Parts& parts, std::uintptr_t stream, double timeout_s);

  // Has NCCL work in place in this rank's copy of `segment`, which is copy `place` of it, as well as this NCCL can.
  // Collective, with the same size and kind on every rank. Whatever it returns or throws, `segment` may be dropped at
  // any time.
  std::pair<WaitStatus, Registration> register_memory(DeviceSegment& segment, std::size_t place, double timeout_s);

  // Sleeps until all that is in `stream` now has been done.
  WaitStatus wait(std::uintptr_t stream, double timeout_s);

  // What has failed since, in NCCL's words; empty: nothing that it knows of.
  std::string error();

  // Ends what is on its way, and every wait here. Returns at once; from any thread.
  void abort();

  // Gives the communicator back once all its work has been done, or aborts it where that is not to be had within
  // `timeout_s`. Returns whether NCCL has let go of it; if not it is left behind.
  bool close(double timeout_s);

 private:
  struct State;
  template <class Call>
  WaitStatus enqueue(const char* what, std::uintptr_t stream, double timeout_s, Call call);
  template <class Call>
  WaitStatus complete(const char* what, double timeout_s, Call call);
  WaitStatus finish(double timeout_s);
  template <class Done>
  WaitStatus until(double timeout_s, Done done);

  int device_, rank_;
  std::uintptr_t last_stream_ = 0;  // 0: nothing has been enqueued
  std::shared_ptr<State> state_;    // the thread that gives it back may outlive this object
};

}  // namespace hvdlite
