// What hvdlite._native has for GPUs.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdlite {

void register_device(pybind11::module_& m);

}  // namespace hvdlite
