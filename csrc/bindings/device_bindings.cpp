#include "bindings/device_bindings.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/binding_types.h"
#include "gpu/cuda_driver.h"
#include "gpu/device_copies.h"
#include "gpu/device_kernels.h"
#include "gpu/device_memory.h"
#include "gpu/device_stream.h"
#include "gpu/direct_allreduce.h"
#include "gpu/file_segment.h"
#include "gpu/handle_segment.h"
#include "gpu/multicast.h"
#include "gpu/multicast_kernels.h"
#include "gpu/nvrtc.h"
#include "gpu/prepared_device_allreduce.h"
#include "gpu/stream_barrier.h"
#include "kernels/elements.h"
#include "kernels/pack.h"
#include "node/ready_counts.h"

namespace py = pybind11;
using namespace py::literals;

namespace hvdlite {
namespace {

std::string uuid_of(int device) {
  cuda::Uuid uuid;
  cuda::check(cuda::driver().device_uuid(&uuid, cuda::device_at(device)), "cuDeviceGetUuid");
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

std::string name_of(int device) {
  char name[256] = "";
  cuda::check(cuda::driver().device_name(name, sizeof name, cuda::device_at(device)), "cuDeviceGetName");
  return name;
}

void register_driver(py::module_& m) {
  m.def("use_cuda_library", &cuda::use_library, "path"_a);
  m.def("cuda_devices", [] {
    int count = 0;
    cuda::check(cuda::driver().device_count(&count), "cuDeviceGetCount");
    return count;
  });
  m.def("cuda_version", [] {
    int version = 0;
    cuda::check(cuda::driver().version(&version), "cuDriverGetVersion");
    return version;
  });
  m.def("kernel_image", &kernel_image);
  m.def("use_kernel_cache", &use_kernel_cache, "directory"_a);
  m.def("cuda_device_uuid", &uuid_of, "device"_a);
  m.def("cuda_device_name", &name_of, "device"_a);
}

void register_copies(py::module_& m) {
  py::class_<PinnedMemory>(m, "PinnedMemory")
      .def(py::init<int, std::size_t>(), "device"_a, "nbytes"_a, WithoutGil())
      .def_property_readonly("address", &PinnedMemory::address)
      .def_property_readonly("nbytes", &PinnedMemory::nbytes)
      .def("leave_behind", &PinnedMemory::leave_behind);
  py::class_<DeviceCopies>(m, "DeviceCopies")
      .def(py::init<int>(), "device"_a, WithoutGil())
      .def(
          "begin",
          [](DeviceCopies& self, const std::vector<const Moment*>& after,
             const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& copies) {
            std::vector<Copy> all;
            all.reserve(copies.size());
            for (const auto& [to, from, nbytes] : copies) all.push_back({to, from, nbytes});
            return self.begin(after, all);
          },
          "after"_a, "copies"_a, WithoutGil());
}

// For libraries that ask which context is the thread's, and call the driver: as in `cuda::Current`, also where a thread
// of the program captures a graph.
struct DeviceContext {
  cuda::Context context;
  std::vector<std::unique_ptr<cuda::Current>> entered;  // by one thread at a time
};

void register_context(py::module_& m) {
  py::class_<DeviceContext>(m, "DeviceContext")
      .def(py::init(
               [](int device) { return std::make_unique<DeviceContext>(DeviceContext{primary_context(device), {}}); }),
           "device"_a, WithoutGil())
      .def("__enter__",
           [](DeviceContext& self) { self.entered.push_back(std::make_unique<cuda::Current>(self.context)); })
      .def("__exit__", [](DeviceContext& self, const py::args&) { self.entered.pop_back(); });
}

void register_streams(py::module_& m) {
  py::class_<Moment>(m, "Moment")
      .def(py::init<int, std::uintptr_t, bool>(), "device"_a, "stream"_a, "is_timed"_a = false, WithoutGil())
      .def("seconds_since", &Moment::seconds_since, "earlier"_a)
      .def("precede", &Moment::precede, "stream"_a, WithoutGil())
      .def("wait", &Moment::wait, WithoutGil())
      .def_property_readonly("is_reached", &Moment::is_reached);
  py::class_<DeviceStream>(m, "DeviceStream")
      .def(py::init<int>(), "device"_a, WithoutGil())
      .def_static(
          "borrowed", [](int device, std::uintptr_t handle) { return std::make_unique<DeviceStream>(device, handle); },
          "device"_a, "handle"_a)
      .def_property_readonly("handle",
                             [](const DeviceStream& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); })
      .def("follow", &DeviceStream::follow, "moments"_a, WithoutGil())
      .def(
          "copy",
          [](const DeviceStream& self, std::uintptr_t to, std::uintptr_t from, std::size_t nbytes) {
            if (nbytes == 0) return;
            const cuda::Current current(self.context());
            cuda::check(cuda::driver().copy(to, from, nbytes, self.handle()), "cuMemcpyAsync");
          },
          "to"_a, "source"_a, "nbytes"_a, WithoutGil())
      .def(
          "zero",
          [](const DeviceStream& self, std::uintptr_t address, std::size_t nbytes) {
            if (nbytes == 0) return;
            const cuda::Current current(self.context());
            cuda::check(cuda::driver().set(address, 0, nbytes, self.handle()), "cuMemsetD8Async");
          },
          "address"_a, "nbytes"_a, WithoutGil())
      .def(
          "fill",
          [](const DeviceStream& self, std::uintptr_t address, std::uint64_t numel, int dtype, double value) {
            DeviceKernels::of(self.device()).fill(address, numel, static_cast<DType>(dtype), value, self.handle());
          },
          "address"_a, "numel"_a, "dtype"_a, "value"_a, WithoutGil())
      .def(
          "pack",
          [](const DeviceStream& self, const TensorList& tensors, std::uintptr_t buffer, std::uint64_t begin,
             std::uint64_t end, int from_dtype, int to_dtype) {
            DeviceKernels::of(self.device())
                .pack(tensors, buffer, begin, end, static_cast<DType>(from_dtype), static_cast<DType>(to_dtype),
                      self.handle());
          },
          "tensors"_a, "buffer"_a, "begin"_a, "end"_a, "from_dtype"_a, "to_dtype"_a, WithoutGil())
      .def(
          "unpack",
          [](const DeviceStream& self, const TensorList& tensors, std::uintptr_t buffer, std::uint64_t begin,
             std::uint64_t end, int from_dtype, int to_dtype) {
            DeviceKernels::of(self.device())
                .unpack(tensors, buffer, begin, end, static_cast<DType>(from_dtype), static_cast<DType>(to_dtype),
                        self.handle());
          },
          "tensors"_a, "buffer"_a, "begin"_a, "end"_a, "from_dtype"_a, "to_dtype"_a, WithoutGil())
      .def(
          "reduce",
          [](const DeviceStream& self, const Addresses& destinations, const Addresses& sources, std::uint64_t numel,
             int dtype, int op, double prescale, double postscale) {
            DeviceKernels::of(self.device())
                .reduce(destinations, sources, numel, static_cast<DType>(dtype), static_cast<Op>(op), prescale,
                        postscale, self.handle());
          },
          "destinations"_a, "sources"_a, "numel"_a, "dtype"_a, "op"_a, "prescale"_a = 1.0, "postscale"_a = 1.0,
          WithoutGil())
      .def(
          "multicast_store",
          [](const DeviceStream& self, std::uintptr_t multicast, std::uintptr_t source, std::uint64_t nbytes) {
            MulticastKernels::of(self.device()).store(multicast, source, nbytes, self.handle());
          },
          "multicast"_a, "source"_a, "nbytes"_a, WithoutGil())
      .def(
          "multicast_sum",
          [](const DeviceStream& self, std::uintptr_t destination, std::uintptr_t multicast, std::uint64_t nbytes,
             int dtype) {
            MulticastKernels::of(self.device())
                .sum(destination, multicast, nbytes, static_cast<DType>(dtype), self.handle());
          },
          "destination"_a, "multicast"_a, "nbytes"_a, "dtype"_a, WithoutGil());
}

void register_memory(py::module_& m) {
  py::class_<DeviceSegment>(m, "DeviceSegment")
      .def("share",
           [](DeviceSegment& self) {
             const auto [bytes, file] = self.share();
             return std::make_pair(py::bytes(bytes), file);
           })
      .def("map", &DeviceSegment::map, "shared"_a, "files"_a, "own"_a, WithoutGil())
      .def_property_readonly("copies", &DeviceSegment::copies);
  py::class_<FileSegment, DeviceSegment>(m, "FileSegment")
      .def(py::init<int, std::size_t>(), "device"_a, "nbytes"_a, WithoutGil());
  py::class_<Multicast>(m, "Multicast")
      .def(py::init<FileSegment&, unsigned>(), "segment"_a, "ranks"_a, py::keep_alive<1, 2>())
      .def("create", &Multicast::create)
      .def("open", &Multicast::open, "file"_a)
      .def("join", &Multicast::join, WithoutGil())
      .def("bind", &Multicast::bind, WithoutGil())
      .def("map", &Multicast::map, WithoutGil())
      .def_property_readonly("address", &Multicast::address);
  py::class_<HandleSegment, DeviceSegment>(m, "HandleSegment")
      .def(py::init<int, std::size_t>(), "device"_a, "nbytes"_a, WithoutGil());
}

// Keeps its page; for good where the driver does not let go of it, as it refuses every call in a function of a stream,
// where Python may come to collect this.
class PagedBarrier : public StreamBarrier {
 public:
  PagedBarrier(const DeviceStream& stream, const py::buffer& page, int rank, int size)
      : StreamBarrier(stream, address_in(page, size), rank, size), page_(page) {}
  ~PagedBarrier() {
    const bool has_let_go = [this] {
      const py::gil_scoped_release unlocked;
      return let_go();
    }();
    if (!has_let_go) page_.release();
  }

 private:
  static std::uintptr_t address_in(const py::buffer& page, int size) {
    const py::buffer_info memory = page.request(true);
    if (static_cast<std::size_t>(memory.size * memory.itemsize) < bytes_needed(size)) {
      throw py::value_error("StreamBarrier: the page is too small");
    }
    return reinterpret_cast<std::uintptr_t>(memory.ptr);
  }

  py::object page_;
};

void register_direct(py::module_& m) {
  py::class_<PagedBarrier>(m, "StreamBarrier")
      .def(py::init<const DeviceStream&, const py::buffer&, int, int>(), "stream"_a, "page"_a, "rank"_a, "size"_a,
           py::keep_alive<1, 2>())
      .def_static("bytes_needed", &StreamBarrier::bytes_needed, "size"_a)
      .def("meet", &StreamBarrier::meet, WithoutGil())
      .def("late", &StreamBarrier::late)
      .def("release", &StreamBarrier::release, WithoutGil())
      .def(
          "allreduce",
          [](PagedBarrier& self, const Addresses& copies, std::uint64_t numel, int dtype, int op, double prescale,
             double postscale) {
            direct_allreduce(self, copies, numel,
                             {static_cast<DType>(dtype), static_cast<Op>(op), prescale, postscale});
          },
          "copies"_a, "numel"_a, "dtype"_a, "op"_a, "prescale"_a, "postscale"_a, WithoutGil())
      .def(
          "staged_allreduce",
          [](PagedBarrier& self, const TensorList& inputs, const TensorList& outputs, const Addresses& copies,
             std::uint64_t window_numel, std::uint64_t numel, int dtype, int wire_dtype, int op, double prescale,
             double postscale) {
            direct_allreduce(self, inputs, outputs, static_cast<DType>(dtype), numel, copies, window_numel,
                             {static_cast<DType>(wire_dtype), static_cast<Op>(op), prescale, postscale});
          },
          "inputs"_a, "outputs"_a, "copies"_a, "window_numel"_a, "numel"_a, "dtype"_a, "wire_dtype"_a, "op"_a,
          "prescale"_a, "postscale"_a, WithoutGil());

  py::class_<PreparedDeviceAllreduce, PreparedInNode>(m, "PreparedDeviceAllreduce")
      .def(py::init([](PagedBarrier& barrier, ReadyCounts& counts, std::vector<std::uint64_t> numels,
                       std::vector<std::uint64_t> offsets, std::uint64_t numel, int dtype, Addresses windows,
                       std::uint64_t window_numel, int wire_dtype, int op, double prescale, double postscale,
                       Patience patience) {
             DeviceAllreduceShape shape{std::move(numels),
                                        std::move(offsets),
                                        numel,
                                        static_cast<DType>(dtype),
                                        std::move(windows),
                                        window_numel,
                                        {static_cast<DType>(wire_dtype), static_cast<Op>(op), prescale, postscale}};
             return std::make_unique<PreparedDeviceAllreduce>(barrier, counts, std::move(shape), patience);
           }),
           "barrier"_a, "counts"_a, "numels"_a, "offsets"_a, "numel"_a, "dtype"_a, "windows"_a, "window_numel"_a,
           "wire_dtype"_a, "op"_a, "prescale"_a, "postscale"_a, "patience"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("use_stream", &PreparedDeviceAllreduce::use_stream, "stream"_a)
      .def("take_done", &PreparedDeviceAllreduce::take_done);
}

}  // namespace

void register_device(py::module_& m) {
  register_driver(m);
  register_context(m);
  register_streams(m);
  register_copies(m);
  register_memory(m);
  register_direct(m);
}

}  // namespace hvdlite
