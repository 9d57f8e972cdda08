// An allgather, or alltoall, that comes again and again as an operation of a frozen plan, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "prepared_in_node.h"
#include "small_gather.h"

namespace hvdlite {

// Each rank tells how many rows it has for whom, and has these rows one after the other: `numbers` of this rank. Of
// each rank this one wants those of its number `column`. All numbers are at least 0.
struct GatherShape {
  std::vector<std::int64_t> numbers;
  std::size_t column;
  std::uint64_t row_bytes;
  bool is_alltoall;  // so that there is a number for each rank; else the rows are for all
};

// Callers make room for what the ranks gave the last time. Where they give something else `run` ends with kBegun: all
// have told, and nothing was read (see SmallGather::run, which has it all then). The next time this is expected. Rows
// for which there is no room beside the numbers go through windows.
class PreparedGather : public PreparedInNode {
 public:
  // `gather`, `windows` and `counts` have to live as long. At first the others are expected to give nothing: to make
  // room for as much as this one gives could be far too much.
  PreparedGather(SmallGather& gather, Windows windows, ReadyCounts& counts, GatherShape shape, Patience patience);

  // Of the expected result.
  std::uint64_t result_rows() const override { return rows_; }

 protected:
  void begin(const std::vector<std::uintptr_t>& inputs, const std::vector<std::uintptr_t>& outputs) override;
  Result finish() override;

 private:
  bool is_as_expected() const;
  void expect_the_same();
  void expect(std::vector<std::int64_t> numbers);
  void read() const;
  OrderedExchange::Result exchange() const;
  std::uint64_t bytes_of(const std::int64_t* numbers, std::size_t columns) const;

  SmallGather& gather_;
  Windows windows_;
  GatherShape shape_;
  std::vector<std::int64_t> expected_;  // rank by rank
  std::uint64_t rows_ = 0;
  bool fits_ = false;  // there is room for what all are expected to give
  std::uintptr_t source_ = 0;
  std::uintptr_t target_ = 0;
};

}  // namespace hvdlite
