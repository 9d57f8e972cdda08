"""What the mpirun of MPICH or Intel MPI says of its ranks' ends with -print-all-exitcodes.

Its own status mixes those of all ranks: Intel's is 255 where one was killed, as it kills the others itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

from hvdlite.cli.job import Launch

_MARK, _WORDS = b"[mpiexec@", b"] Exit codes: "
_LINES = re.compile(rb"\[mpiexec@[^\]\n]*\] Exit codes: ([^\n]*\n(?:\[[^\]\n]*\] [\d, ]*\n)*)")
"""One for all hosts, or one for each."""
_OF_LAUNCHER = (signal.SIGTERM, signal.SIGKILL)  # sent to the others once a rank has failed, the latter mostly


class ExitCodes:
    """Takes mpirun's lines out of what passes through; they are the last that it says.

    Attributes:
        codes: of the ranks, host by host, as `os.waitstatus_to_exitcode` has them; empty where the lines have not come.
        hosts: where each of these ranks was. Hosts that mpirun has not heard of are left out.
    """

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.hosts: list[str] = []
        self._held = b""

    def take_from(self, piece: bytes) -> bytes:
        """What is to be passed on by now; an empty ``piece`` is the end, and leaves nothing behind."""
        data = self._held + piece
        if not piece:
            self._held = b""
            return _LINES.sub(self._note, data)
        kept = _start_of_lines(data)
        self._held = data[kept:]
        return data[:kept]

    def name(self, place: int, launch: Launch) -> str:
        """Which rank it is whose code is at ``place``, or where it is: "rank 2", "a rank on node1"."""
        # Where ranks outnumber slots, or what -ppn says, mpirun goes round the hosts, and comes to each again.
        goes_round = any(option.lstrip("-").partition("=")[0] == "ppn" for option in launch.options)
        in_order = [host.address for host in launch.hosts for _ in range(host.slots)][: launch.ranks]
        is_alone = len(self.hosts) == launch.ranks and len(set(self.hosts)) == 1
        is_rank = is_alone or (self.hosts == in_order and not goes_round)
        return f"rank {place}" if is_rank else f"a rank on {self.hosts[place]}"

    def _note(self, line: re.Match[bytes]) -> bytes:
        found = [
            (host.decode(errors="replace"), os.waitstatus_to_exitcode(int(number)))
            for host, numbers in re.findall(rb"\[([^\]:]*)(?::\d+)?\]([\d, ]*)", line[1])  # Intel numbers its daemons
            for number in re.findall(rb"\d+", numbers)
        ]
        self.hosts = [host for host, _ in found]
        self.codes = [code for _, code in found]
        return b""


def _start_of_lines(data: bytes) -> int:
    """Where in ``data`` they may begin; mpirun's other lines, of which it says many with -v, pass."""
    for found in re.finditer(re.escape(_MARK) + rb"[^\]\n]*", data):
        if _WORDS.startswith(data[found.end() : found.end() + len(_WORDS)]):
            return found.start()
    lengths = (n for n in range(len(_MARK) - 1, 0, -1) if data.endswith(_MARK[:n]))
    return len(data) - next(lengths, 0)


def culprit(codes: Sequence[int], first_end: int | None = None) -> int | None:
    """The place in ``codes`` of the rank whose end explains those of the others, as far as it shows.

    A rank that chose a status, or died of its own, comes before those that fail with 1, as Python does with an
    exception, since that may be for lack of the others; and last come those that were killed, as a launcher kills them:
    mostly by KILL, and once another has ended.

    Args:
        first_end: the place of the rank that ended before all others, if that is known.

    Returns:
        None where all have succeeded.
    """

    def distance(rank: int) -> tuple[int, bool]:
        code = codes[rank]
        kind = (2 + _OF_LAUNCHER.index(-code)) if -code in _OF_LAUNCHER else 1 if code == 1 else 0
        return kind, rank != first_end

    return min((rank for rank, code in enumerate(codes) if code != 0), key=distance, default=None)


def is_telling(code: int) -> bool:
    """Whether a rank's end says more than that it failed or was ended, as all may have been."""
    return code != 1 and -code not in _OF_LAUNCHER


def stands_out(place: int, codes: Sequence[int], first_end: int | None) -> bool:
    """Whether the `culprit` was killed, as all were that have not succeeded; but before them, or alone by TERM."""
    code = codes[place]
    is_only_one = code == -signal.SIGTERM and codes.count(code) == 1
    return -code in _OF_LAUNCHER and (place == first_end or is_only_one)
