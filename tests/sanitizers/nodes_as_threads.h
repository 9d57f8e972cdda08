// What ranks of several nodes do to one another, for ranks_as_threads.
#pragma once

#include "as_threads.h"

namespace hvdlite {

Cases cases_across_nodes();

}  // namespace hvdlite
