// Calls that ranks of a node make in the same order, for ranks_as_threads.
#pragma once

#include "as_threads.h"

namespace hvdlite::in_order {

Cases cases();

}  // namespace hvdlite::in_order
