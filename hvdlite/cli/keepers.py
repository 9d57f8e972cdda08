"""hvdliterun's end of the keepers: starts one on each host as mpirun starts its daemons, asks whether they live."""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from hvdlite.cli.children import end_with_parent
from hvdlite.cli.job import Host, Launch, is_this_machine
from hvdlite.cli.say import say
from hvdlite.config import KEEPER
from hvdlite.links.interfaces import select
from hvdlite.links.proof import Secret, new_key
from hvdlite.links.reception import Reception, listen_at
from hvdlite.links.wire import read_exactly
from hvdlite.naps import RunClock
from hvdlite.processes import is_stopped
from hvdlite.recovery.keeper import CALL, MESSAGE, OF_RANKS, TO_HEAD, Word, notice_silence
from hvdlite.recovery.second_copy import SecondCopy

_ANSWER_S = 3.0
_END_S = 2.0
_LOOK_S = 0.2  # at whether this process is to end
LOOK_S = 1.0
"""Between two looks at the keepers while ranks run."""
_STOPPED_S = 5.0  # of a keeper; ranks wait for its answer for longer
_AGENTS = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")
_AGENT_OPTIONS = ("plm_ssh_agent", "plm_rsh_agent", "launcher-exec")


def agent_of(launch: Launch, environ: Mapping[str, str]) -> list[str]:
    """The words by which mpirun starts a command on another host, whose name and words follow."""
    given = [
        value
        for option, value in zip(launch.options, launch.options[1:], strict=False)
        if option.lstrip("-") in _AGENT_OPTIONS
    ]
    chosen = [*given, *(environ[name] for name in _AGENTS if environ.get(name)), "ssh"][0]
    return [*shlex.split(chosen.partition(" : ")[0]), *launch.ssh]


OnWord = Callable[[Word, int], int]


@dataclass
class _Keeper:
    """One that was started; ``link`` is there once it has called.

    Attributes:
        until_s: when it should have called, by the monotonic clock.
        kept: the number of the commit that it has.
        answered: how many messages have come.
        takes: whether it is to take the second copy, and has not said that it has.
        copies: its connection for second copies, if it has one.
        stopped_s: since when its process here is stopped, by a clock that stands still with this process.
    """

    host: str
    child: subprocess.Popen[bytes]
    until_s: float
    link: socket.socket | None = None
    kept: int = 0
    answered: int = 0
    takes: bool = False
    copies: socket.socket | None = None
    stopped_s: float = math.inf

    @property
    def is_coming(self) -> bool:
        """Whether it may still call."""
        return self.link is None and self.child.poll() is None and time.monotonic() < self.until_s

    def say(self, word: Word, number: int = 0) -> None:
        if self.link is not None:
            with suppress(OSError):
                self.link.sendall(MESSAGE.pack(word, number), socket.MSG_DONTWAIT)

    def hang_up(self) -> None:
        """Let it end, which it does where it can hear this."""
        for link in (self.link, self.copies):
            if link is not None:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        if self.child.stdin is not None:
            with suppress(OSError):
                self.child.stdin.close()

    def end(self, patience_s: float = 0.0) -> None:
        self.hang_up()
        try:
            self.child.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class Keepers:
    """Those of a job, by host.

    Args:
        is_local: whether all hosts are this machine, so that nothing has to listen on the network.
        patience_s: without an answer for so long a connection is lost.
        on_word: called on a thread with what ranks say to hvdliterun, and its number; the answer to a CLAIM.
        start_s: for a keeper to call; half of HVDLITE_START_TIMEOUT.
        needs_directory: whether a host without this process's working directory gets no keeper.

    Attributes:
        environment: by which ranks find the keeper of their host.
    """

    def __init__(
        self,
        launch: Launch,
        environ: Mapping[str, str],
        patience_s: float,
        on_word: OnWord,
        *,
        is_local: bool,
        start_s: float = 15.0,
        needs_directory: bool = False,
    ) -> None:
        self._agent = agent_of(launch, environ)
        self._environ = environ
        self._patience_s = patience_s
        self._on_word = on_word
        self._start_s = start_s
        self._or_else = "|| exit" if needs_directory else "2>/dev/null"
        self._key, self._ranks_key = new_key(), new_key()
        self._name = f"hvdlite-keeper-{secrets.token_hex(16)}"
        self.environment = {KEEPER: f"{self._name}:{self._ranks_key.hex()}"}
        if is_local:
            name = f"hvdlite-head-{secrets.token_hex(16)}"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind("\0" + name)
            listener.listen(16)
            listeners, self._where = [listener], [(name, 0)]
        else:
            addresses = [a for interface in select(launch.interfaces) for a in interface.addresses]
            listeners = listen_at(addresses, 128)
            self._where = [one.getsockname()[:2] for one in listeners]
        self._starter = ThreadPoolExecutor(1, "hvdlite keepers")
        self._changed = threading.Condition()  # guards what follows
        self._started: dict[int, _Keeper] = {}  # by number
        self._numbers = 0
        self._starts = 0  # of ranks
        self._living: dict[str, _Keeper] = {}
        self._lost_s: dict[str, float] = {}  # when hosts lost theirs, by the monotonic clock
        self._copy = SecondCopy()
        self._clock = RunClock(LOOK_S)  # by which keepers are stopped
        self._reception = Reception(listeners, Secret(self._key, TO_HEAD, CALL.size), self._admit)

    @property
    def processes(self) -> list[int]:
        """Children of this process, which live as long as the job."""
        with self._changed:
            return [keeper.child.pid for keeper in self._started.values()]

    @property
    def kept(self) -> dict[str, int]:
        """The number of the commit that each host has, as of the last `ask`; hosts whose keeper lives."""
        with self._changed:
            return {host: keeper.kept for host, keeper in self._living.items()}

    @property
    def newest(self) -> int:
        """The number of the newest commit that a host has, or this process; 0: there is none."""
        return max([self._copy.number, *self.kept.values()])

    def begin_start(self, hosts: Iterable[Host]) -> None:
        """Start those of ``hosts`` that have none."""
        with self._changed:
            there = {keeper.host for keeper in self._started.values()}
        # Not on this thread, with whose end the kernel would end them: one that waits for a host ends with the ranks.
        for started in [self._starter.submit(self._start, host) for host in hosts if host.name not in there]:
            started.result()

    def give_up_late(self) -> list[str]:
        """The names of the hosts whose keepers have been started, and did not call in time, or ended as they did."""
        with self._changed:
            late = [one for one in self._started.values() if one.link is None and not one.is_coming]
        for keeper in late:
            if keeper.child.poll() is None:  # else it has said itself what is wrong, or ssh has
                say(
                    f"{keeper.host}: no keeper has called from there within {self._start_s:g} s; if ssh is only slow, "
                    "raise HVDLITE_START_TIMEOUT (seconds), of which this is half"
                )
            self._forget(keeper)
        return [keeper.host for keeper in late]

    def start(self, hosts: Sequence[Host]) -> list[str]:
        """Start those of ``hosts`` that have none, and wait for them; the names of those that have none then."""
        self.begin_start(hosts)
        names = {host.name for host in hosts}
        with self._changed:
            waited = [keeper for keeper in self._started.values() if keeper.host in names]
            until_s = max((keeper.until_s for keeper in waited), default=0.0)
            self._changed.wait_for(
                lambda: not any(keeper.is_coming for keeper in waited), max(0.0, until_s - time.monotonic())
            )
        late = self.give_up_late()
        kept = self.kept
        return [*late, *(name for name in names if name not in kept and name not in late)]  # some end once they call

    def ask(self) -> list[str]:
        """Ask all what they have; the names of the hosts that do not answer, whose keepers are given up."""
        with self._changed:
            asked = [(keeper, keeper.answered) for keeper in self._living.values()]
        for keeper, _ in asked:
            keeper.say(Word.PING)
        with self._changed:
            self._changed.wait_for(
                lambda: all(keeper.answered > before or keeper.host not in self._living for keeper, before in asked),
                _ANSWER_S,
            )
            silent = [keeper for keeper, before in asked if keeper.answered == before]
        for keeper in silent:
            self._forget(keeper)
        return [keeper.host for keeper in silent]

    def tell(self, word: Word, number: int = 0) -> None:
        with self._changed:
            if word == Word.BEGIN:
                self._starts = number
            living = list(self._living.values())
        for keeper in living:
            keeper.say(word, number)

    def hand_copy(self, host: str, is_stopped: Callable[[], bool]) -> bool:
        """Let the keeper of ``host`` have the commit that is here, if no host has a newer one; waits for it.

        Returns:
            whether some host has the newest commit now, or this process ``is_stopped``; else that keeper is given up.
        """
        with self._changed:
            keeper = self._living.get(host)
            if self._copy.number <= max((one.kept for one in self._living.values()), default=0):
                return True
            if keeper is None:
                return False
            keeper.takes = True
            keeper.say(Word.TAKE)
            while keeper.takes and self._living.get(host) is keeper:
                if is_stopped():
                    return True
                self._changed.wait(_LOOK_S)
            has_it = not keeper.takes and keeper.kept >= self._copy.number
        if not has_it:
            self._forget(keeper)
        return has_it

    def review_copy(self) -> None:
        """Drop the commit that is here once two hosts have a newer one, as they have said until the last call."""
        if self._copy.number:
            if sum(number > self._copy.number for number in self.kept.values()) >= 2:
                self._copy.drop()
            self.tell(Word.PING)

    def kill_stopped(self) -> None:
        """Kill those that have been stopped for a while, to be replaced; called every `LOOK_S` while ranks run.

        What ranks tell them at their end would not be heard: ranks that have succeeded would pass for failed.
        """
        now_s = self._clock.now_s()
        with self._changed:
            started = list(self._started.values())
        for keeper in started:
            keeper.stopped_s = min(now_s, keeper.stopped_s) if is_stopped(keeper.child.pid) else math.inf
            if now_s - keeper.stopped_s >= _STOPPED_S:
                say(f"the keeper of {keeper.host} is stopped, and is replaced")
                self._forget(keeper)

    def close(self) -> None:
        self._reception.close()
        with self._changed:
            started = list(self._started.values())
        for keeper in started:
            keeper.hang_up()
        for keeper in started:
            keeper.end(_END_S)
        self._starter.shutdown()

    def _start(self, host: Host) -> _Keeper:
        here = is_this_machine(host)
        module = [sys.executable, "-c", "from hvdlite.recovery.keeper import main; main()"]
        path = self._environ.get("PYTHONPATH", "")
        enter = f"cd {shlex.quote(os.getcwd())} {self._or_else}"
        script = f"{enter}; PYTHONPATH={shlex.quote(path)} {shlex.join(module)}"
        remote = shlex.join(["sh", "-c", script])  # the user's shell there, which is asked first, may be a csh
        child = subprocess.Popen(
            module if here else [*self._agent, host.name, remote],
            env=dict(self._environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for hvdliterun, which then ends them in order
            preexec_fn=end_with_parent,
        )
        with self._changed:
            number = self._numbers
            self._numbers += 1
            keeper = self._started[number] = _Keeper(host.name, child, time.monotonic() + self._start_s)
        told = {
            "where": self._where,
            "number": number,
            "key": self._key.hex(),
            "name": self._name,
            "ranks_key": self._ranks_key.hex(),
            "patience_s": self._patience_s,
            "is_elsewhere": not here,
        }
        assert child.stdin is not None
        with suppress(OSError):  # it has ended already
            child.stdin.write(json.dumps(told).encode() + b"\n")
            child.stdin.flush()
        threading.Thread(target=self._note_end, args=(keeper,), daemon=True).start()
        return keeper

    def _note_end(self, keeper: _Keeper) -> None:
        keeper.child.wait()
        with self._changed:
            self._changed.notify_all()

    def _admit(self, link: socket.socket, claim: bytes, session: bytes) -> bool:
        number, for_copy = CALL.unpack(claim)
        with self._changed:
            keeper = self._started.get(number)
            if keeper is None or for_copy is (keeper.link is None):
                return False
            if for_copy:
                if keeper.copies is not None:  # which it has lost
                    with suppress(OSError):
                        keeper.copies.shutdown(socket.SHUT_RDWR)
                keeper.copies = link
        if link.family != socket.AF_UNIX:
            notice_silence(link, self._patience_s)
        serve = self._serve_copy if for_copy else self._hear
        threading.Thread(target=serve, args=(keeper, link), daemon=True).start()
        return True

    def _serve_copy(self, keeper: _Keeper, link: socket.socket) -> None:
        # A keeper that was given up may have ranks that go on: their commits are not of this job any more.
        self._copy.serve(
            link, lambda: self._living.get(keeper.host) is keeper, lambda text: say(f"{text} ({keeper.host})")
        )

    def _hear(self, keeper: _Keeper, link: socket.socket) -> None:
        with link, suppress(OSError):
            while True:
                word, number = MESSAGE.unpack(read_exactly(link, MESSAGE.size))
                if word not in (Word.HOLDS, Word.TAKE, *OF_RANKS):
                    say(f"a keeper has sent word {word}, which no keeper sends, and is given up ({keeper.host})")
                    break
                if word in OF_RANKS:
                    answer = self._on_word(Word(word), number)
                    if word == Word.CLAIM:
                        link.sendall(MESSAGE.pack(word, answer))
                    continue
                with self._changed:
                    if keeper.link is None:  # it has all that it needs, and listens
                        keeper.link = link
                        self._living[keeper.host] = keeper
                        if self._starts:  # of these it may see ends, in the place of a keeper that has ended
                            keeper.say(Word.BEGIN, self._starts)
                    keeper.kept = number
                    keeper.answered += word == Word.HOLDS
                    keeper.takes &= word != Word.TAKE
                    self._changed.notify_all()
        # One that has ended as it called is late: the next one would as well, where a host has two names. Unless the
        # one before it is still there, which ends.
        has_lost_s = time.monotonic() - self._lost_s.get(keeper.host, -math.inf)
        if keeper.link is not None or has_lost_s < self._patience_s:
            self._forget(keeper)

    def _forget(self, keeper: _Keeper) -> None:
        with self._changed:
            if self._living.get(keeper.host) is keeper:
                del self._living[keeper.host]
                self._lost_s[keeper.host] = time.monotonic()
            self._started = {number: other for number, other in self._started.items() if other is not keeper}
            self._changed.notify_all()
        keeper.end()
