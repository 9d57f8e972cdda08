#include "exported.h"
#include "usable_stream.h"

namespace gpusim {

Handles<Stream, hvdlite::cuda::Stream>& streams() {
  static auto* all = new Handles<Stream, hvdlite::cuda::Stream>;
  return *all;
}

Stream* find_stream(hvdlite::cuda::Stream handle) {
  return handle == nullptr ? legacy_stream(current()) : streams().find(handle);
}

Error use(hvdlite::cuda::Stream handle, Stream** stream) {
  if (const Error refused = refusal()) return refused;
  *stream = find_stream(handle);
  if (*stream == nullptr) return INVALID_HANDLE;
  return (*stream)->is_capturing ? STREAM_CAPTURE_UNSUPPORTED : SUCCESS;
}

}  // namespace gpusim

namespace hvdlite::cuda {

using namespace gpusim;

namespace {

Handles<gpusim::Event, Event>& events() {
  static auto* all = new Handles<gpusim::Event, Event>;
  return *all;
}

// `captured`: the stream, whose state becomes `capturing`.
Result set_capturing(Stream stream, bool capturing, gpusim::Stream** captured) {
  GPUSIM_NEEDS_CONTEXT;
  *captured = stream == nullptr ? nullptr : find_stream(stream);
  GPUSIM_REQUIRE(*captured != nullptr, INVALID_HANDLE);
  GPUSIM_REQUIRE((*captured)->is_capturing != capturing, INVALID_VALUE);
  (*captured)->is_capturing = capturing;
  return SUCCESS;
}

}  // namespace

Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_REQUIRE(flags <= kStreamNonBlocking, INVALID_VALUE);
  using Kind = gpusim::Stream::Kind;
  const Kind kind = flags == kStreamNonBlocking ? Kind::kNonBlocking : Kind::kBlocking;
  return *stream = streams().add(new gpusim::Stream(current(), kind)), SUCCESS;
}

Result cuStreamDestroy_v2(Stream stream) {
  GPUSIM_NEEDS_CONTEXT;
  gpusim::Stream* destroyed = streams().remove(stream);
  GPUSIM_REQUIRE(destroyed != nullptr, INVALID_HANDLE);
  destroyed->end();
  return SUCCESS;
}

Result cuStreamSynchronize(Stream stream) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  used->synchronize();
  return SUCCESS;
}

Result cuCtxSynchronize() {
  GPUSIM_NEEDS_CONTEXT;
  if (const Error refused = refusal_by_captures_of(gpusim::current())) return refused;
  legacy_stream(gpusim::current())->synchronize();
  for (gpusim::Stream* stream : streams().all()) {
    if (stream->context == gpusim::current()) stream->synchronize();
  }
  return SUCCESS;
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  gpusim::Event* waited_for = events().find(event);
  GPUSIM_REQUIRE(waited_for != nullptr, INVALID_HANDLE);
  GPUSIM_REQUIRE(flags == 0, INVALID_VALUE);
  switch_point();
  const Mark* mark = waited_for->latest();  // of this moment
  if (mark != nullptr) used->push([] {}, [mark] { return mark->is_reached(); });
  return SUCCESS;
}

Result cuStreamIsCapturing(Stream stream, int* status) {
  GPUSIM_NEEDS_CONTEXT;
  gpusim::Stream* asked = find_stream(stream);
  GPUSIM_REQUIRE(asked != nullptr, INVALID_HANDLE);
  constexpr int kCapturing = 1, kInvalidated = 2;
  *status = !asked->is_capturing ? kNotCapturing : is_spoilt(asked) ? kInvalidated : kCapturing;
  return SUCCESS;
}

Result cuStreamBeginCapture_v2(Stream stream, int mode) {
  gpusim::Stream* captured;
  if (const Result refused = set_capturing(stream, true, &captured)) return refused;
  begin_capture(captured, static_cast<CaptureMode>(mode));
  return SUCCESS;
}

Result cuStreamEndCapture(Stream stream, void** graph) {
  *graph = nullptr;
  gpusim::Stream* captured;
  if (const Result refused = set_capturing(stream, false, &captured)) return refused;
  return end_capture(captured);
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  GPUSIM_NEEDS_NO_CONTEXT;
  return *mode = exchange_mode(static_cast<CaptureMode>(*mode)), SUCCESS;
}

Result cuLaunchHostFunc(Stream stream, void (*function)(void*), void* argument) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  used->push([=] {
    const InHostFunction in_host_function;
    function(argument);
  });
  return SUCCESS;
}

Result cuEventCreate(Event* event, unsigned flags) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_REQUIRE((flags & ~(kEventBlockingSync | kEventDisableTiming)) == 0, INVALID_VALUE);
  const bool is_timed = (flags & kEventDisableTiming) == 0;
  return *event = events().add(new gpusim::Event(current(), is_timed)), SUCCESS;
}

Result cuEventDestroy_v2(Event event) {
  GPUSIM_NEEDS_CONTEXT;
  return events().remove(event) != nullptr ? SUCCESS : INVALID_HANDLE;
}

Result cuEventRecord(Event event, Stream stream) {
  gpusim::Stream* used;
  if (const Error refused = use(stream, &used)) return refused;
  gpusim::Event* recorded = events().find(event);
  GPUSIM_REQUIRE(recorded != nullptr && recorded->context == used->context, INVALID_HANDLE);
  recorded->record(*used);
  return SUCCESS;
}

Result cuEventQuery(Event event) {
  GPUSIM_NEEDS_NO_CONTEXT;
  GPUSIM_NEEDS_NO_CAPTURE;
  gpusim::Event* asked = events().find(event);
  GPUSIM_REQUIRE(asked != nullptr, INVALID_HANDLE);
  switch_point();
  const Mark* mark = asked->latest();
  return mark == nullptr || mark->is_reached() ? SUCCESS : NOT_READY;
}

Result cuEventElapsedTime(float* milliseconds, Event from, Event to) {
  GPUSIM_NEEDS_CONTEXT;
  const Mark* marks[2];
  for (const int i : {0, 1}) {
    gpusim::Event* event = events().find(i == 0 ? from : to);
    GPUSIM_REQUIRE(event != nullptr && event->is_timed && event->latest() != nullptr, INVALID_HANDLE);
    marks[i] = event->latest();
  }
  GPUSIM_REQUIRE(marks[0]->is_reached() && marks[1]->is_reached(), NOT_READY);
  return *milliseconds = static_cast<float>(marks[1]->reached_ns - marks[0]->reached_ns) * 1e-6f, SUCCESS;
}

Result cuEventSynchronize(Event event) {
  GPUSIM_NEEDS_CONTEXT;
  GPUSIM_NEEDS_NO_CAPTURE;
  gpusim::Event* waited_for = events().find(event);
  GPUSIM_REQUIRE(waited_for != nullptr, INVALID_HANDLE);
  switch_point();
  const Mark* mark = waited_for->latest();
  if (mark != nullptr) take_turn([mark] { return mark->is_reached(); });
  return SUCCESS;
}

}  // namespace hvdlite::cuda
