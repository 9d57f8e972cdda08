// What arguments of hvdlite._native are made of, wherever they are bound.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace hvdlite {

using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::uint64_t>;
using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace hvdlite
