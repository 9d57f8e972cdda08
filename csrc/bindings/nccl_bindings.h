// What hvdlite._native has for NCCL.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdlite {

void register_nccl(pybind11::module_& m);

}  // namespace hvdlite
