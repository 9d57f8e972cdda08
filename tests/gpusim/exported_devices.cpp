#include <cstring>
#include <map>

#include "exported.h"
#include "settings.h"

namespace hvdlite::cuda {

using namespace gpusim;

namespace {

gpusim::Context* simulated(Context context) { return reinterpret_cast<gpusim::Context*>(context); }
Context handle(gpusim::Context* context) { return reinterpret_cast<Context>(context); }

}  // namespace

Result cuInit(unsigned flags) { return flags == 0 ? initialize() : INVALID_VALUE; }

Result cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }

Result cuGetErrorName(Result error, const char** name) {
  static const std::map<int, const char*> names{{SUCCESS, "CUDA_SUCCESS"},
#define GPUSIM_NAME(name, number) {number, "CUDA_ERROR_" #name},
                                                GPUSIM_ERRORS(GPUSIM_NAME)
#undef GPUSIM_NAME
  };
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return *name == nullptr ? INVALID_VALUE : SUCCESS;
}

Result cuGetErrorString(Result error, const char** text) {
  const char* name = nullptr;
  *text = cuGetErrorName(error, &name) == SUCCESS ? "simulated" : nullptr;
  return *text == nullptr ? INVALID_VALUE : SUCCESS;
}

Result cuDeviceGetCount(int* count) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return *count = device_count(), SUCCESS;
}

Result cuDeviceGet(Device* device, int ordinal) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(ordinal) != nullptr, INVALID_DEVICE);
  return *device = ordinal, SUCCESS;
}

Result cuDeviceGetName(char* name, int length, Device device) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(device) != nullptr, INVALID_DEVICE);
  std::strncpy(name, "Simulated GPU", length);
  return SUCCESS;
}

// Of the device in the machine, whatever the process calls it.
Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(device) != nullptr, INVALID_DEVICE);
  std::memset(uuid->bytes, context_of(device)->physical + 1, sizeof uuid->bytes);
  return SUCCESS;
}

Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  constexpr int kThreadsPerBlock = 1, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;
  const std::map<int, int> attributes{{kThreadsPerBlock, 1024},     {kMultiprocessorCount, 4},
                                      {kComputeCapabilityMajor, 9}, {kComputeCapabilityMinor, 0},
                                      {kDirectRdmaSupported, 0},    {kMulticastSupported, settings().multicast}};
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(device) != nullptr, INVALID_DEVICE);
  const auto found = attributes.find(attribute);
  GPUSIM_REQUIRE(found != attributes.end(), INVALID_VALUE);
  return *value = found->second, SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_REQUIRE(context_of(device) != nullptr, INVALID_DEVICE);
  return *context = handle(context_of(device)), SUCCESS;
}

Result cuCtxPushCurrent_v2(Context context) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return push(simulated(context));
}

Result cuCtxPopCurrent_v2(Context* context) {
  GPUSIM_NEEDS_NO_CONTEXT;
  gpusim::Context* popped = nullptr;
  const Error error = pop(&popped);
  return *context = handle(popped), error;
}

Result cuCtxGetCurrent(Context* context) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return *context = handle(current()), SUCCESS;
}

}  // namespace hvdlite::cuda
