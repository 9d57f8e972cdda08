"""How MPI is ended: with a limit for the ranks that do not come, and one for MPI_Finalize itself. MPI is played."""

from __future__ import annotations

import subprocess
import sys

# A rank whose barrier is through after @BARRIER looks, and whose MPI_Finalize takes @FINALIZE seconds.
RANK = """
import sys, time, types

class Barrier:
    looks = 0
    def Test(self):
        self.looks += 1
        return self.looks > @BARRIER

played = types.ModuleType("mpi4py.MPI")
played.Is_initialized = lambda: True
played.Is_finalized = lambda: False
played.Finalize = lambda: time.sleep(@FINALIZE)
played.COMM_WORLD = types.SimpleNamespace(Ibarrier=Barrier, rank=2)
package = types.ModuleType("mpi4py")
package.rc = types.SimpleNamespace(finalize=False)
sys.modules |= {"mpi4py": package, "mpi4py.MPI": played}

from hvdlite import mpi

mpi._FINALIZE_S = 0.3
print(mpi.finalize(@PATIENCE, lambda: @HOPELESS, lambda: print("finished", flush=True)), flush=True)
sys.exit(7)
"""


def end(
    barrier: float = 3, finalize: float = 0.0, patience_s: str = "30", is_hopeless: bool = False
) -> subprocess.CompletedProcess[str]:
    words = {"@BARRIER": barrier, "@FINALIZE": finalize, "@PATIENCE": patience_s, "@HOPELESS": is_hopeless}
    script = RANK
    for word, value in words.items():
        script = script.replace(word, f"float('{value}')" if isinstance(value, (str, float)) else str(value))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_all_come_to_the_end() -> None:
    done = end()
    assert (done.returncode, done.stdout, done.stderr) == (7, "finished\nTrue\n", "")


def test_who_does_not_come_in_time_is_not_waited_for() -> None:
    done = end(barrier=float("inf"), patience_s="0.2")
    assert (done.returncode, done.stdout) == (7, "False\n"), done.stderr


def test_who_will_never_come_is_not_waited_for() -> None:
    done = end(barrier=float("inf"), patience_s="inf", is_hopeless=True)
    assert (done.returncode, done.stdout) == (7, "False\n"), done.stderr


def test_a_finalize_that_hangs_is_the_end_all_the_same() -> None:
    """All have done their work, so it is no failure."""
    done = end(finalize=60.0)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
    assert (
        "hvdlite: rank 2 has finished, but MPI_Finalize did not come back within 0 s; the process ends" in done.stderr
    )
