// What hvdlite._native has for messages between nodes.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdlite {

void register_messages(pybind11::module_& m);

}  // namespace hvdlite
