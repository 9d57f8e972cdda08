// What ranks of several nodes do to one another, for ranks_as_threads.
#pragma once

#include "as_threads.h"

namespace hvdlite::across_nodes {

Cases cases();

}  // namespace hvdlite::across_nodes
