#include "gpu/handle_segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <system_error>

#include "gpu/device_stream.h"

namespace hvdlite {

using cuda::check;
using cuda::driver;

namespace {

// The driver exports whole blocks of so much; other memory must not be in one.
constexpr std::size_t kBlock = std::size_t{2} << 20;

}  // namespace

struct HandleSegment::Opened : DeviceSegment::Holding {
  struct Import {
    cuda::Address address;
    int pipe;  // of whoever made it
  };

  ~Opened() override {
    const cuda::Current current(context, std::nothrow);
    for (const Import& import : imports) {
      if (import.address != 0) driver().ipc_close(import.address);
      const char closed = 0;
      static_cast<void>(write(import.pipe, &closed, 1) == 1);  // else nobody reads it any more
      close(import.pipe);
    }
    if (pipe >= 0) {
      wait_for_others();
      close(pipe);
    }
    if (own != 0) driver().memory_free(own);
  }

  // Returns once all have closed it, or those that have not are gone.
  void wait_for_others() const {
    for (std::size_t closed = 0; closed < others;) {
      char told[64];
      const ssize_t count = read(pipe, told, sizeof told);
      if (count > 0) closed += count;
      if (count == 0 || (count < 0 && errno != EINTR)) return;
    }
  }

  cuda::Address own = 0;
  int pipe = -1;                                                 // where others tell; -1: it is not shared
  std::size_t others = std::numeric_limits<std::size_t>::max();  // not known
  std::vector<Import> imports;
};

HandleSegment::HandleSegment(int device, std::size_t nbytes)
    : HandleSegment(device, nbytes, std::make_unique<Opened>()) {}

HandleSegment::HandleSegment(int device, std::size_t nbytes, std::unique_ptr<Opened> opened)
    : DeviceSegment(std::move(opened)), opened_(holding<Opened>()) {
  opened_.context = primary_context(device);
  const cuda::Current current(opened_.context);
  opened_.nbytes = std::max<std::size_t>(1, (nbytes + kBlock - 1) / kBlock) * kBlock;
  check(driver().memory_alloc(&opened_.own, opened_.nbytes), "cuMemAlloc");
}

std::pair<std::string, int> HandleSegment::share() {
  const cuda::Current current(opened_.context);
  cuda::IpcHandle handle;
  check(driver().ipc_export(&handle, opened_.own), "cuIpcGetMemHandle");
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  opened_.pipe = ends[0];
  opened_.is_in_use = true;
  return {std::string(handle.bytes, sizeof handle.bytes), ends[1]};
}

void HandleSegment::map(const std::vector<std::string>& shared, const std::vector<int>& files, std::size_t own) {
  const cuda::Current current(opened_.context);
  opened_.is_in_use = true;
  opened_.others = files.size() - 1;
  for (std::size_t place = 0; place < files.size(); ++place) {
    if (place == own) {
      opened_.copies.push_back(opened_.own);
      continue;
    }
    cuda::IpcHandle handle;
    if (shared[place].size() != sizeof handle.bytes) throw std::invalid_argument("HandleSegment: not a handle");
    std::memcpy(handle.bytes, shared[place].data(), sizeof handle.bytes);
    const int pipe = fcntl(files[place], F_DUPFD_CLOEXEC, 0);
    if (pipe < 0) throw std::system_error(errno, std::generic_category(), "dup");
    auto& import = opened_.imports.emplace_back(Opened::Import{0, pipe});
    check(driver().ipc_open(&import.address, handle, cuda::kLazyPeerAccess), "cuIpcOpenMemHandle");
    opened_.copies.push_back(import.address);
  }
}

}  // namespace hvdlite
