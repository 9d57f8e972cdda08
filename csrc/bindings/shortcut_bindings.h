// What hvdlite._native has for what a program does again and again.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdlite {

void register_shortcut(pybind11::module_& m);

}  // namespace hvdlite
