#include "captures.h"

#include <map>
#include <mutex>
#include <thread>

#include "streams.h"
#include "unobserved.h"

namespace gpusim {
namespace {

struct Capture {
  CaptureMode mode;
  std::thread::id thread;
  bool is_spoilt = false;
};

std::mutex mutex;
std::map<Stream*, Capture>& captures() {
  static auto* all = new std::map<Stream*, Capture>;
  return *all;
}

thread_local CaptureMode mode_of_thread = kCapturesOfAll;

bool is_forbidden_by(const Capture& capture) {
  if (mode_of_thread == kNoCaptures) return false;
  if (capture.thread == std::this_thread::get_id()) return capture.mode != kNoCaptures;
  return capture.mode == kCapturesOfAll && mode_of_thread == kCapturesOfAll;
}

template <class Forbids>
Error refusal_where(Forbids forbids) {
  const Locked locked(mutex);
  Error found = SUCCESS;
  for (auto& [stream, capture] : captures()) {
    if (!forbids(*stream, capture)) continue;
    capture.is_spoilt = true;
    found = STREAM_CAPTURE_UNSUPPORTED;
  }
  return found;
}

}  // namespace

void begin_capture(Stream* stream, CaptureMode mode) {
  const Locked locked(mutex);
  captures()[stream] = {mode, std::this_thread::get_id()};
}

Error end_capture(Stream* stream) {
  const Locked locked(mutex);
  const bool is_spoilt = captures()[stream].is_spoilt;
  captures().erase(stream);
  return is_spoilt ? STREAM_CAPTURE_INVALIDATED : SUCCESS;
}

bool is_spoilt(Stream* stream) {
  const Locked locked(mutex);
  return captures()[stream].is_spoilt;
}

CaptureMode exchange_mode(CaptureMode mode) {
  const CaptureMode before = mode_of_thread;
  mode_of_thread = mode;
  return before;
}

Error refusal_by_captures() {
  return refusal_where([](const Stream&, const Capture& capture) { return is_forbidden_by(capture); });
}

Error refusal_by_captures_of(const Context* context) {
  return refusal_where([=](const Stream& stream, const Capture&) { return stream.context == context; });
}

}  // namespace gpusim
