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
_ENDED_BADLY = re.compile(
    rb"=   (RANK \d+ )?PID (\d+) RUNNING AT ([^\n]+)\n=   (?:EXIT CODE|KILLED BY SIGNAL): (\d+)[ \n]"
)
"""Said once the ranks of a host have ended, one of them by a signal; only then those of other hosts are ended."""
_LONGEST = 512  # bytes of that
_OF_LAUNCHER = (signal.SIGTERM, signal.SIGKILL)  # sent to the others once a rank has failed, the latter mostly


class ExitCodes:
    """Takes mpirun's lines out of what passes through; they are the last that it says.

    Attributes:
        codes: of the ranks, host by host, as `os.waitstatus_to_exitcode` has them; empty where the lines have not come.
        hosts: where each of these ranks was. Hosts that mpirun has not heard of are left out.
        first_host: where the first rank was killed; empty where none was.
    """

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.hosts: list[str] = []
        self.first_host = ""
        self._alone = ""  # what the rank is called whose code is the only one that is known
        self._misses_ends = False  # of that host, too: MPICH's mpirun
        self._held = self._passed = b""

    def take_from(self, piece: bytes) -> bytes:
        """What is to be passed on by now; an empty ``piece`` is the end, and leaves nothing behind."""
        if not self.first_host:
            self._look_for_first(piece)
        data = self._held + piece
        if not piece:
            self._held = b""
            return _LINES.sub(self._note, data)
        kept = _start_of_lines(data)
        self._held = data[kept:]
        return data[:kept]

    def name(self, place: int, launch: Launch) -> str:
        """Which rank it is whose code is at ``place``, or where it is: "rank 2", "a rank on node1"."""
        if self._alone:
            return self._alone
        return f"rank {place}" if self._are_by_rank(launch) else f"a rank on {self.hosts[place]}"

    @property
    def were_killed_at_first_host(self) -> bool:
        """Whether all there were, as a launcher kills them, and nobody has failed otherwise.

        Where mpirun has not heard of a rank's end it says 0; of another host's that may be so with all.
        """
        ends = zip(self.hosts, self.codes, strict=True)
        return self.first_host in self.hosts and all(
            -code in _OF_LAUNCHER or (code == 0 and (host != self.first_host or self._misses_ends))
            for host, code in ends
        )

    def place_of(self, rank: int | None, launch: Launch) -> int | None:
        """Of the code of a rank that ended before the others; None where that is not known."""
        if self._alone:
            return 0
        return rank if rank is not None and rank < len(self.codes) and self._are_by_rank(launch) else None

    def _are_by_rank(self, launch: Launch) -> bool:
        # Where ranks outnumber slots, or what -ppn says, mpirun goes round the hosts, and comes to each again.
        goes_round = any(option.lstrip("-").partition("=")[0] == "ppn" for option in launch.options)
        in_order = [host.address for host in launch.hosts for _ in range(host.slots)][: launch.ranks]
        is_alone = len(self.hosts) == launch.ranks and len(set(self.hosts)) == 1
        return is_alone or (self.hosts == in_order and not goes_round)

    def _look_for_first(self, piece: bytes) -> None:
        self._passed = self._passed[-_LONGEST:] + piece
        if found := _ENDED_BADLY.search(self._passed):
            self.first_host, self._misses_ends = found[3].decode(errors="replace"), found[1] is None
            # MPICH's mostly does not come to its lines then, where there are several hosts.
            self.codes, self.hosts = [-int(found[4])], [self.first_host]
            self._alone = f"a rank on {self.first_host} (pid {int(found[2])})"

    def _note(self, line: re.Match[bytes]) -> bytes:
        found = [
            (host.decode(errors="replace"), os.waitstatus_to_exitcode(int(number)))
            for host, numbers in re.findall(rb"\[([^\]:]*)(?::\d+)?\]([\d, ]*)", line[1])  # Intel numbers its daemons
            for number in re.findall(rb"\d+", numbers)
        ]
        self._alone = ""
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


def culprit(codes: Sequence[int], first_end: int | None = None, missed: int | None = None) -> int | None:
    """The place in ``codes`` of the rank whose end explains those of the others, as far as it shows.

    A rank that chose a status, or died of its own, comes before those that fail with 1, as Python does with an
    exception, since that may be for lack of the others; and last come those that were killed, as a launcher kills them:
    mostly by KILL, and once another has ended.

    Args:
        first_end: the place of the rank that ended before all others, if that is known.
        missed: the place of the rank after whose failure others have said that they end.

    Returns:
        None where all have succeeded.
    """

    def distance(rank: int) -> tuple[int, bool, bool]:
        code = codes[rank]
        kind = (2 + _OF_LAUNCHER.index(-code)) if -code in _OF_LAUNCHER else 1 if code == 1 else 0
        if rank == missed:  # it may have been killed by others than the launcher
            kind = min(kind, 1)
        return kind, rank != missed, rank != first_end

    return min((rank for rank, code in enumerate(codes) if code != 0), key=distance, default=None)


def is_telling(code: int) -> bool:
    """Whether a rank's end says more than that it failed or was ended, as all may have been."""
    return code != 1 and -code not in _OF_LAUNCHER


def stands_out(place: int, codes: Sequence[int], first_end: int | None) -> bool:
    """Whether the `culprit` was killed, as all were that have not succeeded; but before them, or alone by TERM."""
    code = codes[place]
    is_only_one = code == -signal.SIGTERM and codes.count(code) == 1
    return -code in _OF_LAUNCHER and (place == first_end or is_only_one)
