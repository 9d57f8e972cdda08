// One rank's end of a communicator, and those that this process has.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "meeting.h"
#include "registered_memory.h"

namespace nccl_sim {

enum Result { kSuccess, kCuda, kSystem, kInternal, kInvalidArgument, kInvalidUsage, kRemote, kInProgress };

// For tests: what every communicator of this process reports from now on; how many registrations fail from now on.
extern std::atomic<int> injected, refusals;

struct Operation {
  Description description;
  const char* from;  // none: nothing is sent from here
  char* to;          // none: nothing is received here
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int size);
  ~Communicator();

  // Of those that have not been given back; another one ends the process.
  static std::shared_ptr<Communicator> find(void* handle);
  static std::shared_ptr<Communicator> remove(void* handle);
  static int living();
  void* publish();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int state() const { return injected != kSuccess ? injected.load() : state_.load(); }

  void connect(Place place);
  void enqueue(std::vector<Operation> operations, void* stream);
  void finalize();
  void abort();
  void destroy();

  std::int64_t place_of(const void* memory) { return memory_.place_of(memory); }
  // `handle` is there when the communicator is ready again.
  void register_window(const void* begin, std::size_t nbytes, void** handle);
  Result register_buffer(const void* begin, std::size_t nbytes, void** handle);
  void deregister(void* handle, Kind kind);

 private:
  void later(std::function<Result()> work);
  bool open(Place place);
  template <class Condition>
  bool wait_until(Condition condition);
  bool meet(const Window& own);
  void run(const Operation& operation);
  void exchange(const Operation& operation, std::size_t offset, std::size_t count);
  bool receive(const Operation& operation, std::size_t offset, std::size_t count, std::uint64_t number);

  const int rank_, size_;
  void* context_ = nullptr;
  Meeting* meeting_ = nullptr;
  RegisteredMemory memory_;
  std::uint64_t calls_ = 0;  // that all ranks make
  bool is_finalized_ = false;
  std::atomic<int> state_{kInProgress}, in_flight_{0};
  std::atomic<bool> aborted_{false};
  std::mutex running_;
  std::uint64_t pieces_ = 0;  // guarded by running_
};

}  // namespace nccl_sim
