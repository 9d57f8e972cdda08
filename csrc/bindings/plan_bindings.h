// What hvdlite._native has for frozen plans: how far ranks are, and their operations as one call each.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdlite {

void register_plans(pybind11::module_& m);

}  // namespace hvdlite
