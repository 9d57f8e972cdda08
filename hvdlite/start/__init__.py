"""Where ranks meet that were started together, without MPI."""
