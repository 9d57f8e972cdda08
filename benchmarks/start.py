"""How long hvd.init() takes once all ranks are there, which begin together at a time of day.

python -m hvdlite run -np 2 start.py
python -m hvdlite run --mpi -np 2 start.py
"""

from __future__ import annotations

import time

import hvdlite

BEGINNINGS_S = 5.0  # between two times at which ranks may begin; imports end earlier, but on a busy machine


def main() -> None:
    time.sleep(BEGINNINGS_S - time.time() % BEGINNINGS_S)
    start = time.monotonic()
    hvdlite.init()
    print(f"rank {hvdlite.rank()} of {hvdlite.size()}: init() took {time.monotonic() - start:.3f} s", flush=True)


if __name__ == "__main__":
    main()
