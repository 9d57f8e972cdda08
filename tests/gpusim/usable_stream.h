// The stream of a handle, 0 being the legacy stream of the current context.
#pragma once

#include "gpu/cuda_driver.h"
#include "handles.h"
#include "streams.h"

namespace gpusim {

Handles<Stream, hvdlite::cuda::Stream>& streams();

// Null: there is none, or no more.
Stream* find_stream(hvdlite::cuda::Stream handle);

// Whether something can be enqueued. A stream that is captured could take it, but the simulator captures nothing.
Error use(hvdlite::cuda::Stream handle, Stream** stream);

}  // namespace gpusim
