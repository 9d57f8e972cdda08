// Streams that are being captured into graphs, and the calls that threads may not make meanwhile.
#pragma once

#include "results.h"

namespace gpusim {

struct Context;
struct Stream;

// As CUDA has them: of a capture, whose calls it forbids; of a thread, which captures forbid it calls.
enum CaptureMode : int { kCapturesOfAll, kCapturesOfThread, kNoCaptures };

void begin_capture(Stream* stream, CaptureMode mode);
// An error: a call that it forbids has spoilt it.
Error end_capture(Stream* stream);

bool is_spoilt(Stream* stream);

// The mode of this thread until now.
CaptureMode exchange_mode(CaptureMode mode);

// What is answered to calls that could disturb a capture; one that is refused has spoilt it.
Error refusal_by_captures();
// And to those that wait for all streams of a context, whatever the mode.
Error refusal_by_captures_of(const Context* context);

}  // namespace gpusim
