// What DeviceKernels do, compared with what the host's kernels do: to the bit, but for which NaN a NaN is.
//
// kernels CASE WAY exits with 0, or says on stderr what failed; without a case it names all. WAY: "loops", GPU threads
// one after the other in the grid of the launch, on many sizes; or a seed, GPU threads as fibers in a small grid.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/portable.h"
#include "gpu/device_kernels.h"
#include "gpu/kernel_image.h"
#include "gpu/multicast_kernels.h"
#include "gpu/nvrtc.h"
#include "gpusim/fibers.h"
#include "gpusim/gpu_thread.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "table_driver.h"

namespace {

using namespace hvdlite;
using table_driver::Launch;

constexpr std::uint64_t kTile = kernels::kTileNumel;
constexpr DType kAll[] = {DType::kUint8,   DType::kInt8,     DType::kInt16,   DType::kInt32,   DType::kInt64,
                          DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64, DType::kBool};
constexpr Op kOps[] = {Op::kSum, Op::kMin, Op::kMax, Op::kProduct};

std::string detail;  // of the comparison at hand
bool in_loops = true;
std::minstd_rand chance;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s %s\n", what, detail.c_str());
  std::_Exit(1);
}
#define REQUIRE(condition) require((condition), #condition)

template <class... Values>
void describe(const char* format, Values... values) {
  char text[300];
  std::snprintf(text, sizeof text, format, values...);
  detail = text;
}

const DeviceKernels& device() { return DeviceKernels::of(0); }

// Bytes that end where their memory ends, so that AddressSanitizer sees what is beyond; those before are guarded.
class Bytes {
 public:
  Bytes(std::size_t nbytes, std::size_t misalignment) : nbytes_(nbytes), all_(kGuard + misalignment + nbytes, '\xab') {
    REQUIRE(reinterpret_cast<std::uintptr_t>(all_.data()) % 16 == 0);
  }
  char* data() { return all_.data() + all_.size() - nbytes_; }
  std::uintptr_t address() { return reinterpret_cast<std::uintptr_t>(data()); }
  std::size_t size() const { return nbytes_; }
  bool guard_is_whole() {
    return std::all_of(all_.data(), data(), [](char byte) { return byte == '\xab'; });
  }
  bool operator==(const Bytes& other) const { return all_ == other.all_; }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t nbytes_;
  std::vector<char> all_;
};

// A number just beside the middle between two of bfloat16 or float16, which fp32 cannot tell from the middle.
double beside_a_middle() {
  const double below = chance() % 2 == 0 ? 128 + chance() % 128 : 1024 + chance() % 1024;
  return below + 0.5 + (chance() % 2 == 0 ? 0x1p-30 : -0x1p-30);
}

// Where values of all kinds are likely: small ones, some that are hard to round, and any bits at all.
void randomize(Bytes& bytes, DType dtype, bool any_bits) {
  const std::uint64_t count = bytes.size() / item_bytes(dtype);
  for (std::uint64_t i = 0; i < count; ++i) {
    char* at = bytes.data() + i * item_bytes(dtype);
    if (dtype == DType::kBool) {
      *at = chance() % 2;
    } else if (any_bits) {
      for (std::size_t k = 0; k < item_bytes(dtype); ++k) at[k] = static_cast<char>(chance() >> 8);
    } else {
      double value = static_cast<double>(chance() % 4096) / (is_floating(dtype) ? 61.0 : 40.0) - 33.0;
      if (chance() % 4 == 0) value = beside_a_middle();
      if (!is_floating(dtype)) {
        const auto whole = static_cast<std::int64_t>(value);
        std::memcpy(at, &whole, item_bytes(dtype));
      } else {
        TensorList({reinterpret_cast<std::uintptr_t>(&value)}, {1}, {0})
            .pack(reinterpret_cast<std::uintptr_t>(at), 0, 1, DType::kFloat64, dtype, 1.0);
      }
    }
  }
}

bool is_nan(const char* element, DType dtype) {
  if (!is_floating(dtype)) return false;
  double value = 0;
  TensorList({reinterpret_cast<std::uintptr_t>(element)}, {1}, {0})
      .pack(reinterpret_cast<std::uintptr_t>(&value), 0, 1, dtype, DType::kFloat64, 1.0);
  return value != value;
}

bool is_alike(Bytes& got, Bytes& expected, DType dtype) {
  if (!got.guard_is_whole()) return false;
  const std::size_t step = item_bytes(dtype);
  for (std::size_t at = 0; at < got.size(); at += step) {
    const char *a = got.data() + at, *b = expected.data() + at;
    if (std::memcmp(a, b, step) != 0 && !(is_nan(a, dtype) && is_nan(b, dtype))) {
      detail += " at element " + std::to_string(at / step);
      return false;
    }
  }
  return true;
}

struct Scaling {
  double before, after;
};

void reduce_once(DType dtype, Op op, std::uint64_t numel, std::size_t arrays, Scaling scaling, bool in_place,
                 bool alike) {
  describe("dtype %d op %d numel %llu arrays %zu scaling %g %g in place %d alike %d", static_cast<int>(dtype),
           static_cast<int>(op), static_cast<unsigned long long>(numel), arrays, scaling.before, scaling.after,
           in_place, alike);
  const std::size_t item = item_bytes(dtype), first = chance() % 4 * item;
  const bool any_bits = chance() % 2 == 0;
  std::vector<Bytes> got, expected;
  const auto misalignment = [&](std::size_t i) { return alike ? first : i * item; };
  const std::size_t nbytes = numel * item;
  for (std::size_t i = 0; i < arrays; ++i) randomize(got.emplace_back(nbytes, misalignment(i)), dtype, any_bits);
  expected = got;
  std::vector<std::uintptr_t> sources, expected_sources;
  for (Bytes& bytes : got) sources.push_back(bytes.address());
  for (Bytes& bytes : expected) expected_sources.push_back(bytes.address());
  Bytes result(nbytes, first), expected_result(nbytes, first);
  const auto into = in_place ? sources : std::vector<std::uintptr_t>{result.address()};
  const auto expected_into = in_place ? expected_sources : std::vector<std::uintptr_t>{expected_result.address()};
  device().reduce(into, sources, numel, dtype, op, scaling.before, scaling.after, nullptr);
  Reducer(dtype, op, scaling.before, scaling.after).reduce(expected_into, expected_sources, 0, numel);
  for (std::size_t i = 0; i < arrays; ++i) REQUIRE(is_alike(got[i], expected[i], dtype));
  REQUIRE(is_alike(result, expected_result, dtype));
}

// Around a group, what the threads of all blocks take at once (8 x 256 groups of up to 8), and a few of each.
std::vector<std::uint64_t> reduce_sizes() {
  if (!in_loops) return {0, 1, 9, 100, 333};
  return {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 257, 2047, 2049, 16383, 16384, 16391, 16393, 40000};
}

void reduce() {
  const Scaling scalings[] = {{1, 1}, {0.3, 1}, {1, 1.0 / 3}, {1.5, 0.25}, {1, 0.7}};
  for (const DType dtype : kAll) {
    if (dtype == DType::kBool) continue;
    for (const Op op : kOps) {
      for (const std::uint64_t numel : reduce_sizes()) {
        for (const std::size_t arrays : {1, 2, 5}) {
          const Scaling& scaling = scalings[chance() % std::size(scalings)];
          reduce_once(dtype, op, numel, arrays, chance() % 2 == 0 ? scaling : scalings[0], chance() % 2 == 0,
                      chance() % 3 != 0);
        }
      }
    }
  }
}

void reduce_all_scalings() {
  for (const DType dtype : kAll) {
    if (dtype == DType::kBool) continue;
    for (const Op op : kOps) {
      if (!in_loops && op != Op::kSum) continue;
      for (const double before : {1.0, 0.5, -3.7}) {
        for (const double after : {1.0, 1.0 / 7, 0.5, 1e30}) {
          for (const std::size_t arrays : {1, 4}) {
            reduce_once(dtype, op, in_loops ? 500 : 20, arrays, {before, after}, true, true);
          }
        }
      }
    }
  }
}

void reduce_many_arrays() {
  for (const std::size_t arrays : {3, 4, 6, 7, 8, 9, 63, 64}) {
    for (const bool in_place : {false, true}) {
      reduce_once(DType::kFloat32, Op::kSum, 77, arrays, {1, 1.0 / 64}, in_place, true);
      reduce_once(DType::kBfloat16, Op::kSum, 77, arrays, {1, 1}, in_place, false);
    }
  }
}

// A layout with gaps, empty tensors, zeros that nobody stored and tensors that live in the buffer.
struct Layout {
  std::vector<std::uint64_t> numels, offsets;
  std::vector<int> kinds;  // 0: zeros, 1: in the buffer, else memory of its own
  std::uint64_t end = 0;

  void add(std::uint64_t gap, std::uint64_t numel, int kind) {
    offsets.push_back(end + gap);
    numels.push_back(numel);
    kinds.push_back(kind);
    end += gap + numel;
  }
};

Layout random_layout(std::size_t tensors, std::uint64_t largest) {
  Layout layout;
  for (std::size_t i = 0; i < tensors; ++i) {
    const std::uint64_t gap = chance() % 3 == 0 ? chance() % 40 : 0;
    const std::uint64_t numel = chance() % 8 == 0 ? 0 : chance() % largest + 1;
    layout.add(chance() % 2 == 0 ? gap : (8 - layout.end % 8) % 8, numel, static_cast<int>(chance() % 6));
  }
  layout.end += chance() % 20;
  return layout;
}

// One side of a comparison: tensors and a buffer with elements [begin, end).
struct Side {
  std::vector<Bytes> tensors;
  Bytes buffer;

  TensorList list(const Layout& layout, std::uint64_t begin, std::uint64_t end, DType dtype, DType of_buffer) {
    std::vector<std::uintptr_t> addresses;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const bool in_buffer = layout.kinds[i] == 1 && dtype == of_buffer && layout.offsets[i] >= begin &&
                             layout.offsets[i] + layout.numels[i] <= end;
      const auto place = buffer.address() + (layout.offsets[i] - begin) * item_bytes(dtype);
      addresses.push_back(layout.kinds[i] == 0 ? 0 : in_buffer ? place : tensors[i].address());
    }
    return {addresses, layout.numels, layout.offsets};
  }
};

Side random_side(const Layout& layout, std::uint64_t begin, std::uint64_t end, DType dtype, DType of_buffer) {
  const bool any_bits = chance() % 2 == 0;
  std::vector<Bytes> tensors;
  for (const std::uint64_t numel : layout.numels) {
    const std::size_t nbytes = numel * item_bytes(dtype);
    const std::size_t misalignment = chance() % 4 == 0 ? item_bytes(dtype) : 0;
    randomize(tensors.emplace_back(nbytes, misalignment), dtype, any_bits);
  }
  const std::size_t nbytes = (end - begin) * item_bytes(of_buffer);
  Side side{std::move(tensors), Bytes(nbytes, 0)};
  randomize(side.buffer, of_buffer, any_bits);
  return side;
}

void move_once(const Layout& layout, std::uint64_t begin, std::uint64_t end, DType of_tensors, DType of_buffer) {
  describe("%d, in the buffer %d, tensors %zu elements %llu to %llu", static_cast<int>(of_tensors),
           static_cast<int>(of_buffer), layout.numels.size(), static_cast<unsigned long long>(begin),
           static_cast<unsigned long long>(end));
  for (const bool packs : {true, false}) {
    Side got = random_side(layout, begin, end, of_tensors, of_buffer), expected = got;
    const TensorList list = got.list(layout, begin, end, of_tensors, of_buffer);
    const TensorList expected_list = expected.list(layout, begin, end, of_tensors, of_buffer);
    if (packs) {
      device().pack(list, got.buffer.address(), begin, end, of_tensors, of_buffer, nullptr);
      expected_list.pack(expected.buffer.address(), begin, end, of_tensors, of_buffer, 1.0);
    } else {
      device().unpack(list, got.buffer.address(), begin, end, of_buffer, of_tensors, nullptr);
      expected_list.unpack(expected.buffer.address(), begin, end, of_buffer, of_tensors, 1.0);
    }
    REQUIRE(is_alike(got.buffer, expected.buffer, of_buffer));
    for (std::size_t i = 0; i < got.tensors.size(); ++i) {
      REQUIRE(is_alike(got.tensors[i], expected.tensors[i], of_tensors));
    }
  }
}

void move_in_ranges(const Layout& layout, DType of_tensors, DType of_buffer) {
  move_once(layout, 0, layout.end, of_tensors, of_buffer);
  const std::uint64_t begin = layout.end / 3, end = begin + layout.end / 2;
  move_once(layout, begin, end, of_tensors, of_buffer);
  move_once(layout, begin, begin, of_tensors, of_buffer);
}

// All that are cast into one another.
void for_each_pair(const std::function<void(DType, DType)>& call) {
  for (const DType from : kAll) {
    for (const DType to : kAll) {
      if (from == to || (is_floating(from) && is_floating(to))) call(from, to);
    }
  }
}

void move_types() {
  for_each_pair([](DType of_tensors, DType of_buffer) {
    for (const std::size_t tensors : {1, 2, 30}) {
      if (!in_loops && tensors == 1) continue;
      move_in_ranges(random_layout(tensors, in_loops ? 3000 : 30), of_tensors, of_buffer);
    }
  });
}

// Around a tile, and around the tiles that all blocks take at once (8 in loops).
void move_tiles() {
  if (!in_loops) {
    Layout layout;
    layout.add(1, kTile, 2);
    layout.add(1, 5, 2);
    return move_once(layout, 0, layout.end, DType::kFloat32, DType::kBfloat16);
  }
  for (const std::uint64_t numel : {kTile - 1, kTile, kTile + 1, 8 * kTile - 1, 8 * kTile, 8 * kTile + 1, 9 * kTile}) {
    for (const std::uint64_t gap : {0, 1, 8}) {
      Layout layout;
      layout.add(gap, numel, 2);
      layout.add(gap, 5, 2);
      layout.end += gap;
      move_in_ranges(layout, DType::kFloat32, DType::kFloat32);
      move_in_ranges(layout, DType::kFloat32, DType::kBfloat16);
    }
  }
}

// Around the tensors of one launch, with the gap that ends the first one on either side.
void move_tables() {
  const std::size_t table = kernels::kTableTensors;
  std::vector<std::size_t> counts{table - 1, table, table + 1, 2 * table + 1};
  if (!in_loops) counts = {table + 1};
  for (const std::size_t tensors : counts) {
    move_in_ranges(random_layout(tensors, in_loops ? 200 : 8), DType::kFloat32, DType::kFloat16);
    Layout dense;
    for (std::size_t i = 0; i < tensors; ++i) dense.add(i % 2 * 3, i % 5, 2);
    move_in_ranges(dense, DType::kInt32, DType::kInt32);
  }
  Layout empty;
  empty.end = 100;
  move_in_ranges(empty, DType::kInt32, DType::kInt32);
  for (std::size_t i = 0; i < table + 1; ++i) empty.add(0, 0, 2);
  move_in_ranges(empty, DType::kInt32, DType::kInt32);
}

template <class T>
void fill_as(DType dtype, double value, T expected) {
  const std::vector<std::uint64_t> sizes = in_loops ? std::vector<std::uint64_t>{0, 1, 2, 3, 15, 16, 17, 33, 70000}
                                                    : std::vector<std::uint64_t>{0, 1, 7, 100};
  for (const std::uint64_t numel : sizes) {
    for (std::size_t misalignment = 0; misalignment < 16; misalignment += sizeof(T)) {
      describe("dtype %d value %g numel %llu misalignment %zu", static_cast<int>(dtype), value,
               static_cast<unsigned long long>(numel), misalignment);
      const std::size_t nbytes = numel * sizeof(T);
      Bytes got(nbytes, misalignment);
      device().fill(got.address(), numel, dtype, value, nullptr);
      REQUIRE(got.guard_is_whole());
      for (std::uint64_t i = 0; i < numel; ++i)
        REQUIRE(std::memcmp(got.data() + i * sizeof(T), &expected, sizeof(T)) == 0);
    }
  }
}

void fill() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  fill_as<std::uint8_t>(DType::kUint8, 200, 200);
  fill_as<std::int8_t>(DType::kInt8, -1000, -128);
  fill_as<std::int16_t>(DType::kInt16, 0x1234, 0x1234);
  fill_as<std::int32_t>(DType::kInt32, -2.9, -2);
  fill_as<std::int64_t>(DType::kInt64, kInfinity, std::numeric_limits<std::int64_t>::max());
  fill_as<std::uint16_t>(DType::kFloat16, 1.5, 0x3e00);
  fill_as<std::uint16_t>(DType::kBfloat16, -kInfinity, 0xff80);
  fill_as<float>(DType::kFloat32, 0.1, 0.1f);
  fill_as<double>(DType::kFloat64, 0.1, 0.1);
  fill_as<bool>(DType::kBool, 1, true);
}

// Memory of several GPUs at one address.
constexpr std::uintptr_t kMulticast = std::uintptr_t{1} << 40;
std::vector<std::uintptr_t> bound;

void store_once(std::size_t copies, std::size_t nbytes) {
  describe("copies %zu nbytes %zu", copies, nbytes);
  Bytes source(nbytes, 0);
  randomize(source, DType::kUint8, true);
  std::vector<Bytes> got;
  bound.clear();
  for (std::size_t i = 0; i < copies; ++i) randomize(got.emplace_back(nbytes, 0), DType::kUint8, true);
  for (Bytes& bytes : got) bound.push_back(bytes.address());
  MulticastKernels::of(0).store(kMulticast, source.address(), nbytes, nullptr);
  for (const Bytes& bytes : got) REQUIRE(bytes == source);
}

void sum_once(std::size_t copies, std::size_t nbytes, DType dtype, bool to_all) {
  describe("copies %zu nbytes %zu dtype %d to all %d", copies, nbytes, static_cast<int>(dtype), to_all);
  std::vector<Bytes> got, before;
  const bool any_bits = chance() % 2 == 0;
  for (std::size_t i = 0; i < copies; ++i) randomize(got.emplace_back(nbytes, 0), dtype, any_bits);
  before = got;
  std::vector<std::uintptr_t> sources;
  bound.clear();
  for (Bytes& bytes : got) bound.push_back(bytes.address());
  for (Bytes& bytes : before) sources.push_back(bytes.address());
  Bytes result(nbytes, 0), expected(nbytes, 0);
  MulticastKernels::of(0).sum(to_all ? 0 : result.address(), kMulticast, nbytes, dtype, nullptr);
  Reducer(dtype, Op::kSum, 1, 1).reduce({expected.address()}, sources, 0, nbytes / item_bytes(dtype));
  for (std::size_t i = 0; i < copies; ++i) REQUIRE(is_alike(got[i], to_all ? expected : before[i], dtype));
  REQUIRE(to_all || is_alike(result, expected, dtype));
}

void multicast() {
  const std::vector<std::size_t> sizes =
      in_loops ? std::vector<std::size_t>{0, 16, 32, 4080, 4096, 4112, 70000} : std::vector<std::size_t>{0, 16, 400};
  for (const std::size_t nbytes : sizes) {
    for (const std::size_t copies : {1, 2, 3, 8}) {
      store_once(copies, nbytes);
      for (const DType dtype : {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64}) {
        for (const bool to_all : {false, true}) sum_once(copies, nbytes, dtype, to_all);
      }
    }
  }
}

template <class Call>
void refuses(const char* what, const Call& call) {
  detail = what;
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  REQUIRE(!"no exception");
}

void refused() {
  int number = 0;
  const auto address = reinterpret_cast<std::uintptr_t>(&number);
  const auto reduces = [&](std::size_t sources, DType dtype) {
    device().reduce({address}, std::vector<std::uintptr_t>(sources, address), 1, dtype, Op::kSum, 1, 1, nullptr);
  };
  refuses("no source", [&] { reduces(0, DType::kInt32); });
  refuses("65 sources", [&] { reduces(65, DType::kInt32); });
  refuses("bool", [&] { reduces(1, DType::kBool); });
  const TensorList one({address}, {1}, {0});
  const auto sums = [&](std::uintptr_t to, std::size_t nbytes, DType dtype) {
    MulticastKernels::of(0).sum(to, kMulticast, nbytes, dtype, nullptr);
  };
  refuses("an address between vectors", [&] { sums(kMulticast + 8, 16, DType::kFloat32); });
  refuses("half a vector", [&] { sums(0, 24, DType::kFloat32); });
  refuses("a multicast of integers", [&] { sums(0, 16, DType::kInt32); });
  refuses("half a vector to store", [&] { MulticastKernels::of(0).store(kMulticast, kMulticast, 8, nullptr); });
  refuses("a cast of integers", [&] { device().pack(one, address, 0, 1, DType::kInt32, DType::kFloat32, nullptr); });
}

// Whether a race would be seen at all: every GPU thread writes the same word.
void race() {
  int word = 0;
  gpusim::run_as_fibers([&] { ++word; }, 2, 2, 0);
  REQUIRE(word == 4);
}

// Whether GPU threads do run at the same time: others have begun before the first one ends.
void turns() {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  int early = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::atomic<int> begun{0}, before_an_end{0};
    std::atomic<bool> ended{false};
    gpusim::run_as_fibers(
        [&] {
          before_an_end.fetch_add(ended.load(kRelaxed) ? 0 : 1, kRelaxed);
          begun.fetch_add(1, kRelaxed);
          kernels::before_access();
          ended.store(true, kRelaxed);
        },
        2, 4, seed);
    REQUIRE(begun == 8);
    early += before_an_end;
  }
  REQUIRE(early > 20);
}

const std::map<std::string, std::function<void()>> kCases{
    {"reduce", reduce},
    {"reduce all scalings", reduce_all_scalings},
    {"reduce many arrays", reduce_many_arrays},
    {"move types", move_types},
    {"move tiles", move_tiles},
    {"move tables", move_tables},
    {"fill", fill},
    {"multicast", multicast},
    {"refused", refused},
    {"turns", turns},
};

// Prints what the compiler at run time makes of a module of kernels, which it keeps in `cache`.
void compile(const std::string& module, const std::string& cache) {
  use_kernel_cache(cache);
  const std::string image = compile_kernels(module == "multicast" ? kMulticastSource : kKernelSource, 9, 0);
  std::fwrite(image.data(), 1, image.size(), stdout);
}

}  // namespace

namespace hvdlite::kernels {

Bound bound_to(Address multicast) {
  Bound found{};
  for (const std::uintptr_t copy : bound) found.copies[found.count++] = copy + (multicast - kMulticast);
  return found;
}

}  // namespace hvdlite::kernels

int main(int argc, char** argv) {
  if (argc == 1) {
    for (const auto& [name, work] : kCases) std::puts(name.c_str());
    return 0;
  }
  const std::string name = argv[1], way = argc > 2 ? argv[2] : "loops";
  if (name == "compile") return compile(way, argc > 3 ? argv[3] : ""), 0;
  if (name == "race") return race(), 0;
  in_loops = way == "loops";
  if (in_loops) {
    table_driver::on_launch([](const Launch& launch) {
      for (unsigned block = 0; block < launch.blocks; ++block) {
        for (unsigned index = 0; index < launch.threads; ++index) {
          gpusim::become(index, block, launch.threads, launch.blocks);
          launch.thread();
        }
      }
    });
  } else {
    const auto seed = static_cast<unsigned>(std::atoi(way.c_str()));
    chance.seed(seed + 1);
    table_driver::on_launch(
        [=](const Launch& launch) { gpusim::run_as_fibers(launch.thread, std::min(launch.blocks + 1, 3u), 5, seed); });
  }
  kCases.at(name)();
}
