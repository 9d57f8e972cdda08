// Arithmetic of NCCL's types and operations, by their numbers.
#pragma once

#include <cstddef>
#include <vector>

namespace nccl_sim {

constexpr int kTypes = 10;

std::size_t item_bytes(int dtype);

// to = op over `from`, in the order of ranks.
void reduce(void* to, const std::vector<const char*>& from, std::size_t count, int dtype, int op);

}  // namespace nccl_sim
