// Operations of a plan that runs free, for ranks_as_threads.
#pragma once

#include "as_threads.h"

namespace hvdlite {

Cases cases_of_plans();

}  // namespace hvdlite
