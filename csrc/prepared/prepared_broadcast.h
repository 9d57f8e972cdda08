// A broadcast of more than few bytes that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "prepared/prepared_in_node.h"

namespace hvdlite {

// Of `bytes` of one tensor of rank `root` of the node.
class PreparedBroadcast : public PreparedInNode {
 public:
  // `windows` and `counts` have to live as long.
  PreparedBroadcast(Windows windows, ReadyCounts& counts, std::uint64_t bytes, std::uint32_t root, Patience patience)
      : PreparedInNode(counts, nullptr, patience), windows_(windows), bytes_(bytes), root_(root) {}

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override;

 private:
  Windows windows_;
  std::uint64_t bytes_;
  std::uint32_t root_;
  std::uintptr_t source_ = 0;  // 0 where this rank gives nothing
  std::uintptr_t target_ = 0;
};

}  // namespace hvdlite
