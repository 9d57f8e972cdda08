// An allgather, or alltoall, that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "node/small_gather.h"
#include "prepared/expected_rows.h"
#include "prepared/prepared_in_node.h"

namespace hvdlite {

// Callers make room for what the ranks gave the last time. Where they give something else `run` ends with kBegun: all
// have told, and nothing was read (see SmallGather::run, which has it all then). The next time this is expected. Rows
// for which there is no room beside the numbers go through windows.
class PreparedGather : public PreparedInNode {
 public:
  // `gather`, `windows` and `counts` have to live as long.
  PreparedGather(SmallGather& gather, Windows windows, ReadyCounts& counts, GatherShape shape, Patience patience);

  // Of the expected result.
  std::uint64_t result_rows() const override { return expected_.rows(); }

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override;

 private:
  OrderedExchange::Result exchange() const;

  SmallGather& gather_;
  Windows windows_;
  ExpectedRows expected_;
  std::uintptr_t source_ = 0;
  std::uintptr_t target_ = 0;
};

}  // namespace hvdlite
