#include "gpu/nvrtc.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "gpu/cuda_driver.h"

namespace hvdlite {
namespace {

using Path = std::filesystem::path;
using Program = struct OpaqueProgram*;

// name in the table, exported symbol, parameters
#define HVDLITE_NVRTC_FUNCTIONS(F)                                                                          \
  F(version, nvrtcVersion, (int* major, int* minor))                                                        \
  F(architecture_count, nvrtcGetNumSupportedArchs, (int* count))                                            \
  F(architectures, nvrtcGetSupportedArchs, (int* architectures))                                            \
  F(create, nvrtcCreateProgram,                                                                             \
    (Program * program, const char* source, const char* name, int, const char* const*, const char* const*)) \
  F(destroy, nvrtcDestroyProgram, (Program * program))                                                      \
  F(compile, nvrtcCompileProgram, (Program, int count, const char* const* options))                         \
  F(log_bytes, nvrtcGetProgramLogSize, (Program, std::size_t* n))                                           \
  F(log, nvrtcGetProgramLog, (Program, char* text))                                                         \
  F(ptx_bytes, nvrtcGetPTXSize, (Program, std::size_t* n))                                                  \
  F(ptx, nvrtcGetPTX, (Program, char* ptx))                                                                 \
  F(cubin_bytes, nvrtcGetCUBINSize, (Program, std::size_t* n))                                              \
  F(cubin, nvrtcGetCUBIN, (Program, char* cubin))

void check(int result, const char* what) {
  if (result != 0) throw std::runtime_error(std::string(what) + ": error " + std::to_string(result));
}

// Where Python has installed what is beside torch; empty without torch.
Path site_packages() {
  Path library;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        const Path path = info->dlpi_name;
        if (path.filename() != "libc10.so") return 0;
        *static_cast<Path*>(found) = path;
        return 1;
      },
      &library);
  return library.parent_path().parent_path().parent_path();  // site-packages/torch/lib/libc10.so
}

std::vector<std::string> matches(const Path& pattern) {
  glob_t found;
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

// One that the process has loaded, one of the wheels that torch comes with, one of the system; or nullptr.
void* find_compiler(const std::string& name) {
  if (void* loaded = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return loaded;
  const Path site = site_packages();
  if (!site.empty()) {
    for (const std::string& path : matches(site / "nvidia" / "*" / "lib" / name)) {
      if (void* beside_torch = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return beside_torch;
    }
  }
  if (void* known = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return known;
  return dlopen(("/usr/local/cuda/lib64/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
}

class Compiler {
 public:
  Compiler() {
    library_ = open();
#define HVDLITE_FIND(name, symbol, parameters) name = reinterpret_cast<int(*) parameters>(find(#symbol));
    HVDLITE_NVRTC_FUNCTIONS(HVDLITE_FIND)
#undef HVDLITE_FIND
  }

#define HVDLITE_DECLARE(name, symbol, parameters) int(*name) parameters;
  HVDLITE_NVRTC_FUNCTIONS(HVDLITE_DECLARE)
#undef HVDLITE_DECLARE

 private:
  // One of the driver's generation, since an older driver may not load what a newer compiler writes.
  static void* open() {
    int version = 0;
    cuda::check(cuda::driver().version(&version), "cuDriverGetVersion");
    std::vector<std::string> names{"libnvrtc.so.12", "libnvrtc.so.13"};
    if (version >= 13000) std::reverse(names.begin(), names.end());
    for (const std::string& name : names) {
      if (void* library = find_compiler(name)) return library;
    }
    throw std::runtime_error(
        "there is no libnvrtc.so.12 or libnvrtc.so.13 to compile them; install a torch for CUDA, or "
        "nvidia-cuda-nvrtc");
  }

  void* find(const char* symbol) const {
    if (void* function = dlsym(library_, symbol)) return function;
    throw std::runtime_error(std::string("libnvrtc has no ") + symbol + "; it is too old");
  }

  void* library_;
};

// The newest of the compiler's architectures that the GPU runs, as 10 * major + minor.
int architecture_for(const Compiler& compiler, int wanted) {
  int count = 0;
  check(compiler.architecture_count(&count), "nvrtcGetNumSupportedArchs");
  std::vector<int> known(count);
  check(compiler.architectures(known.data()), "nvrtcGetSupportedArchs");
  int best = 0;
  for (const int architecture : known) {
    if (architecture <= wanted) best = std::max(best, architecture);
  }
  if (best == 0) throw std::runtime_error("libnvrtc knows no GPU as old as sm_" + std::to_string(wanted));
  return best;
}

struct Target {
  std::string architecture;  // sm_90: code of the GPU; compute_90: PTX
  std::vector<std::string> options() const {
    // Without --fmad=false a * b + c would be rounded once, and on CPUs twice.
    return {"--gpu-architecture=" + architecture, "--std=c++17", "--fmad=false"};
  }
};

std::string compile(const Compiler& compiler, const std::string& source, const Target& target) {
  Program program;
  check(compiler.create(&program, source.c_str(), "kernels.cu", 0, nullptr, nullptr), "nvrtcCreateProgram");
  const std::vector<std::string> options = target.options();
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  const int result = compiler.compile(program, static_cast<int>(arguments.size()), arguments.data());
  const auto text = [&](auto size, auto get) {
    std::size_t bytes = 0;
    std::string all;
    check(size(program, &bytes), "nvrtc");
    all.resize(bytes);
    check(get(program, all.data()), "nvrtc");
    return all;
  };
  const bool is_ptx = target.architecture[0] == 'c';
  const std::string output = result != 0 ? text(compiler.log_bytes, compiler.log)
                             : is_ptx    ? text(compiler.ptx_bytes, compiler.ptx)
                                         : text(compiler.cubin_bytes, compiler.cubin);
  compiler.destroy(&program);
  if (result != 0) throw std::runtime_error("libnvrtc cannot compile them: " + output);
  return output;
}

// FNV-1a.
std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 0xcbf29ce484222325u;
  for (const char letter : text) value = (value ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  return value;
}

Path& cache_directory() {
  static auto* path = new Path;
  return *path;
}

std::string read(const Path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Whole or not at all; a cache that cannot be written is no error.
void write(const Path& file, const std::string& text) {
  std::error_code ignored;
  std::filesystem::create_directories(file.parent_path(), ignored);
  const Path own = file.string() + "." + std::to_string(std::random_device()());  // process ids repeat on other hosts
  std::ofstream stream(own, std::ios::binary);
  stream << text;
  stream.close();
  if (stream) std::filesystem::rename(own, file, ignored);
  std::filesystem::remove(own, ignored);
}

}  // namespace

void use_kernel_cache(const std::string& directory) { cache_directory() = directory; }

std::string compile_kernels(const std::string& source, int major, int minor) {
  const Compiler compiler;
  const int wanted = 10 * major + minor;
  const int architecture = architecture_for(compiler, wanted);
  const Target target{(architecture == wanted ? "sm_" : "compute_") + std::to_string(architecture)};
  int version[2] = {};
  check(compiler.version(&version[0], &version[1]), "nvrtcVersion");
  std::string key = std::to_string(version[0]) + "." + std::to_string(version[1]) + source;
  for (const std::string& option : target.options()) key += option;
  const Path& directory = cache_directory();
  const Path file = directory / ("kernels-" + target.architecture + "-" + std::to_string(hash(key)));
  std::string image = directory.empty() ? "" : read(file);
  if (!image.empty()) return image;
  image = compile(compiler, source, target);
  if (!directory.empty()) write(file, image);
  return image;
}

}  // namespace hvdlite
