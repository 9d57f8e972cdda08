// One address for the copies of all ranks of a node: see csrc/cuda/multicast.h for what is done with it.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/file_segment.h"

namespace hvdlite {

// Of the copies of a segment, each on a GPU of its own. All ranks make each step before any makes the next; one that
// throws std::runtime_error makes none any more. The segment takes it along when it goes; all ranks have to be done
// with the address by then, as a copy that goes is missing for the others.
class Multicast {
 public:
  // First step. Throws where the driver or the GPU does not offer it.
  Multicast(FileSegment& segment, unsigned ranks);
  ~Multicast();

  // The first rank's: a file descriptor for the others, which the caller closes.
  int create();
  // Those of the others.
  void open(int file);

  void join();  // the GPU of this rank
  void bind();  // the copy of this rank
  void map();   // from now on it goes with the segment

  // What is at an offset there is at that offset in every copy.
  std::uintptr_t address() const;

 private:
  struct Team;

  FileSegment& segment_;
  unsigned ranks_;
  std::shared_ptr<Team> team_;
};

}  // namespace hvdlite
