// Operations of a plan that runs free, for ranks_as_threads.
#pragma once

#include "as_threads.h"

namespace hvdlite::of_plans {

Cases cases();

}  // namespace hvdlite::of_plans
