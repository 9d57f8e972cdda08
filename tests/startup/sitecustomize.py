"""What every Python of the suites that start many does first: look seldom for garbage, and not at all at the end.

Half a second of the two that a rank needs to start and end goes into looks through what torch's modules have made. The
suite mpi ends as programs of users do.
"""

import atexit
import gc

gc.set_threshold(200_000, 50, 100)
atexit.register(gc.freeze)  # the first that is registered is the last that is called
