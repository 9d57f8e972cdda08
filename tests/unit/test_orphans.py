"""Processes that ranks leave behind become children of hvdliterun: none stays as a zombie while the job goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.cli import children
from hvdlite.cli.children import Orphans, children_of
from run_lab import executable

# It has 20 children that end at once, and leaves them to hvdliterun; then it counts those that are still there.
LEAVES_SOME = """
sh -c 'for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 0.1 & done'
tries=0
while
    zombies=0
    for pid in $(cat /proc/$PPID/task/$PPID/children); do
        grep -q 'State:.Z' /proc/$pid/status && zombies=$((zombies + 1))
    done
    tries=$((tries + 1))
    [ $tries -le 5 ] || [ $zombies -gt 1 ] && [ $tries -le 200 ]
do sleep 0.05; done
echo $zombies >"$1"
"""
FRONT = "import sys; from hvdlite.cli import children, run; children._ORPHANS_S = 0.2; sys.exit(run.main(sys.argv[1:]))"


@pytest.mark.parametrize("by", ["", "--elastic", "--mpirun"])
def test_what_ranks_leave_behind_is_reaped(by: str, tmp_path: Path) -> None:
    program = executable(tmp_path / "program", LEAVES_SOME)
    version = 'echo "mpirun (Open MPI) 5.0.11"'
    mpirun = executable(
        tmp_path / "mpirun", f'[ "$1" = --version ] && {version} && exit\nexec {program} {tmp_path}/left'
    )
    options = {"": [], "--elastic": [by], "--mpirun": [by, str(mpirun)]}[by]
    command = [sys.executable, "-c", FRONT, "-np", "1", *options, str(program), str(tmp_path / "left")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "left").read_text()) <= 1


def test_who_has_just_ended_is_left_to_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_ORPHANS_S", 0.0)
    orphans = Orphans()
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    orphans.reap_if_due()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    orphans.reap_if_due()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_a_process_that_ends_while_it_is_looked_at_has_no_children() -> None:
    """Its directory in /proc goes at any moment; here, some hundred times a second."""
    parent = subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"])
    try:
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            for pid in children_of(parent.pid):
                while os.path.exists(f"/proc/{pid}"):
                    assert children_of(pid) == []
    finally:
        parent.kill()
        parent.wait()
