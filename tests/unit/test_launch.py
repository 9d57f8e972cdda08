"""`hvdlite.run` with a shell script in mpirun's place: results, failures, and the messages between caller and ranks."""

from __future__ import annotations

import io
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import hvdlite
from hvdlite import remote_call
from hvdlite.config import CALL_ADDRESS, CALL_KEY
from hvdlite.errors import RankFailedError, StartupError
from hvdlite.links.proof import Caller
from hvdlite.remote_call import CallServer, pack
from ipv6 import has_ipv6
from launching import MARK, processes_with
from proof_lab import hang_up_on_the_first

# In the script that plays mpirun: its options end where the ranks' Python stands.
PROGRAM = f'while [ "$1" != {shlex.quote(sys.executable)} ]; do shift; done'


class TestRun:
    @pytest.fixture
    def options(self, tmp_path: Path) -> list[str]:
        """An mpirun that starts two ranks, ends with the status of the last, and ends all at TERM."""
        start = 'for r in 0 1; do OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$r "$@" & p="$p $!"; done'
        wait = "trap 'kill $p' TERM; for i in $p; do wait $i || s=$?; done; exit $s"
        return self.mpirun(tmp_path, f"{PROGRAM}\n{start}\n{wait}")

    def mpirun(self, tmp_path: Path, script: str) -> list[str]:
        path = tmp_path / "mpirun"
        version = '[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit'
        path.write_text(f"#!/bin/sh\n{version}\n{script}\n")
        path.chmod(0o755)
        return ["--mpirun", str(path)]

    def test_results_in_order_of_rank(self, options: list[str]) -> None:
        def function(start: int, *, step: int) -> tuple[int, str]:
            rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
            time.sleep(0.2 * (1 - rank))
            return start + step * rank, os.environ["HVDLITE_TEST"]

        env = {"HVDLITE_TEST": "seen"}
        results = hvdlite.run(function, (10,), {"step": 5}, num_proc=2, env=env, options=options)
        assert results == [(10, "seen"), (15, "seen")]

    def test_output_is_this_process_s(self, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        hvdlite.run(lambda: (print("a line ü"), print("a complaint", file=sys.stderr)), num_proc=2, options=options)
        # Unbuffered ranks may write into one another's lines.
        assert sorted(out.getvalue()) == sorted("a line ü\n" * 2)
        assert sorted(err.getvalue()) == sorted("a complaint\n" * 2)  # and not a word of ours

    def test_verbose_prints_the_command(self, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        hvdlite.run(int, num_proc=2, options=[*options, "--gloo"], verbose=True)
        errors = capsys.readouterr().err
        assert f"{options[1]} " in errors and "remote_call.main()" in errors
        assert "--gloo: hvdlite communicates by" in errors

    def test_an_exception_with_its_rank_and_traceback(self, options: list[str]) -> None:
        def loses() -> None:
            if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
                raise LookupError("no more data")

        with pytest.raises(LookupError, match="no more data") as caught:
            hvdlite.run(loses, num_proc=2, options=options)
        cause = caught.value.__cause__
        assert isinstance(cause, RankFailedError)
        assert cause.rank == 1
        assert "rank 1 raised:\nTraceback" in str(cause) and "in loses" in str(cause) and "in main" not in str(cause)

    def test_the_cause_goes_before_its_consequences(self, options: list[str]) -> None:
        def fails() -> None:
            if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
                time.sleep(0.5)
                raise ValueError("the loss is not a number")
            raise hvdlite.RankFailedError(1, "rank 1 raised")

        with pytest.raises(ValueError, match="the loss"):
            hvdlite.run(fails, num_proc=2, options=options)

    def test_what_must_not_end_the_caller(self, options: list[str]) -> None:
        def leaves() -> None:
            sys.exit(3)

        with pytest.raises(RankFailedError, match="SystemExit: 3"):
            hvdlite.run(leaves, num_proc=2, options=options)

    def test_an_exception_that_cannot_be_sent(self, options: list[str]) -> None:
        class Locked(Exception):
            def __init__(self, code: int, text: str) -> None:
                super().__init__(text)

        def fails() -> None:
            raise Locked(1, "locked")

        with pytest.raises(RankFailedError, match="Locked: locked"):
            hvdlite.run(fails, num_proc=2, options=options)

    def test_a_result_that_cannot_be_sent(self, options: list[str]) -> None:
        with pytest.raises(TypeError, match="the result, a generator, cannot be pickled"):
            hvdlite.run(lambda: (x for x in ()), num_proc=2, options=options)

    def test_a_function_that_cannot_be_sent(self, options: list[str]) -> None:
        generator = (x for x in ())
        with pytest.raises(TypeError, match="generator"):
            hvdlite.run(lambda: generator, num_proc=2, options=options)

    def test_a_rank_that_dies(self, options: list[str]) -> None:
        def dies() -> None:
            if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
                os.kill(os.getpid(), 9)

        with pytest.raises(RankFailedError, match=r"rank 1 ended without a result: .* exit status is 137") as caught:
            hvdlite.run(dies, num_proc=2, options=options)
        assert caught.value.rank == 1

    def test_no_rank_starts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = self.mpirun(tmp_path, "echo no slots >&2; exit 4")
        with pytest.raises(StartupError, match="no rank started; hvdliterun ended with exit status 4"):
            hvdlite.run(int, num_proc=2, options=options)
        assert capsys.readouterr().err == "no slots\n"

    def test_ranks_that_never_start(self, tmp_path: Path) -> None:
        options = [*self.mpirun(tmp_path, "sleep 60"), "--start-timeout", "1"]
        mark = f"{MARK}={tmp_path}"
        env = dict([mark.split("=")])
        with pytest.raises(StartupError, match="ranks 0, 1 did not start within 1 s; .* HVDLITE_START_TIMEOUT"):
            hvdlite.run(int, num_proc=2, options=options, env=env)
        assert processes_with(mark) == {}

    def test_a_bad_end_after_all_results(self, tmp_path: Path) -> None:
        options = self.mpirun(tmp_path, f'{PROGRAM}\nOMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 "$@"; exit 9')
        with pytest.warns(RuntimeWarning, match="all ranks returned, but hvdliterun ended with exit status 9"):
            assert hvdlite.run(int, num_proc=1, options=options) == [0]

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({}, "how many ranks"),
            ({"num_proc": 0}, "above 0"),
            ({"num_proc": 2, "hosts": "a b"}, "write host:slots"),
            ({"num_proc": 2, "options": ["--cycle-time-ms", "-1"]}, "--cycle-time-ms -1: must not be negative"),
            ({"num_proc": 2, "options": ["--restarts", "1"]}, "leave out --restarts"),
            ({"num_proc": 2, "env": {"HVDLITE_CYCLE_TIME": "-1"}}, "HVDLITE_CYCLE_TIME='-1'"),
        ],
    )
    def test_mistakes_are_exceptions(self, arguments: dict[str, object], text: str) -> None:
        with pytest.raises(StartupError, match=text):
            hvdlite.run(int, **arguments)  # type: ignore[arg-type]

    def test_not_inside_a_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        with pytest.raises(StartupError, match="this process is one already, started by mpirun"):
            hvdlite.run(int, num_proc=2)


@pytest.mark.parametrize(
    "addresses", [[], ["127.0.0.1"], ["::1"], ["127.0.0.2", "127.0.0.1"]], ids=["unix", "tcp", "ipv6", "two"]
)
class TestServer:
    """Without processes: the ranks' side is played here."""

    @pytest.fixture
    def server(self, addresses: list[str]) -> CallServer:
        if addresses == ["::1"] and not has_ipv6():
            pytest.skip("no IPv6 here")
        return CallServer(pack(divmod, (7, 2), {}, {}), addresses)

    def test_hands_out_the_call_and_keeps_what_comes_of_it(
        self, server: CallServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        for rank in (2, 0):
            launched = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": str(rank)}
            for name, value in {**server.environment, **launched}.items():
                monkeypatch.setenv(name, value)
            remote_call.main()
            assert CALL_KEY not in os.environ
        outcomes = server.close()
        assert server.seen() == {0, 2}
        assert sorted((o.rank, o.returned, o.result()) for o in outcomes) == [(0, True, (3, 1)), (2, True, (3, 1))]

    def test_strangers_get_nothing_and_hold_nobody_up(self, server: CallServer) -> None:
        key, where = bytes.fromhex(server.environment[CALL_KEY]), server.environment[CALL_ADDRESS]
        silent = self.connected(where)
        for message in (b"GET / HTTP/1.0\r\n\r\n" + b" " * 100, bytes(20) + b"\xff" * 40, bytes(1000)):
            with self.connected(where) as link:
                link.sendall(message)
                assert len(self.rest(link)) <= Caller.answer_bytes  # a challenge at most
        with pytest.raises((ConnectionError, StartupError)):
            remote_call._connect(where, bytes(32), 0)
        assert server.seen() == set()
        link, messages = remote_call._connect(where, key, 5)
        with link:
            assert messages.receive() == pack(divmod, (7, 2), {}, {})
        silent.close()
        assert server.close() == [] and server.seen() == {5}

    def test_no_message_can_be_made_up_or_sent_again(self, server: CallServer) -> None:
        """By who sits between the ends: not another length, not the call sent back, nor the outcome of before."""
        key, where = bytes.fromhex(server.environment[CALL_KEY]), server.environment[CALL_ADDRESS]
        for change in (
            lambda said: (1 << 60).to_bytes(8, "little") + said[8:],
            lambda said: said[:-33] + bytes([said[-33] ^ 1]) + said[-32:],
        ):
            link, messages = remote_call._connect(where, key, 1)
            with link:
                messages.receive()
                recorder = Recorder()
                remote_call._Messages(recorder, messages._session, remote_call._CALLER).send(b"\1an outcome")
                link.sendall(change(bytes(recorder.said)))
                assert self.rest(link) == b""
        for _ in range(2):  # recorded in one connection, sent in another
            link, messages = remote_call._connect(where, key, 1)
            with link:
                messages.receive()
                link.sendall(recorder.said)
                assert self.rest(link) == b""
        link, messages = remote_call._connect(where, key, 1)
        with link:
            call = pack(divmod, (7, 2), {}, {})
            link.sendall(link.recv(8 + 32 + len(call) + 32, socket.MSG_WAITALL))  # the call itself, sent back
            assert self.rest(link) == b""
        assert server.close() == []

    def connected(self, where: str) -> socket.socket:
        if where.startswith("@"):
            link = socket.socket(socket.AF_UNIX)
            link.connect("\0" + where[1:])
            return link
        port, _, address = where.split(",")[0].partition("/")
        return socket.create_connection((address, int(port)))

    def rest(self, link: socket.socket) -> bytes:
        link.settimeout(10)
        try:
            return link.recv(100)
        except ConnectionResetError:  # it was closed with unread bytes
            return b""


class Recorder:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.said = bytearray()

    def sendall(self, data: bytes) -> None:
        self.said += data


def test_a_message_that_is_sent_again_in_its_own_connection_is_refused() -> None:
    recorder, (own, other) = Recorder(), socket.socketpair()
    with own, other:
        remote_call._Messages(recorder, bytes(32), remote_call._CALLER).send(b"an outcome")
        messages = remote_call._Messages(own, bytes(32), remote_call._HOST)
        other.sendall(recorder.said * 2)
        assert messages.receive() == b"an outcome"
        with pytest.raises(ConnectionError, match="not a message of this job"):
            messages.receive()


def test_it_listens_at_the_addresses_it_tells_and_no_others() -> None:
    server = CallServer(b"", ["127.0.0.1", "192.0.2.1"])  # the second is nobody's (RFC 5737)
    port, _, address = server.environment[CALL_ADDRESS].partition("/")
    assert address == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5)
    server.close()
    with pytest.raises(StartupError, match=r"192\.0\.2\.1.*HVDLITE_NETWORK_INTERFACES"):
        CallServer(b"", ["192.0.2.1"])


@pytest.fixture
def silent_address() -> Iterator[tuple[str, int]]:
    """One that drops what is sent to it, as behind a firewall: nobody takes connections, and the queue is full."""
    with ExitStack() as links:
        listener = links.enter_context(socket.create_server(("127.0.0.3", 0), backlog=0))
        for _ in range(2):
            link = links.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(listener.getsockname())
        yield listener.getsockname()


def check_that_a_rank_connects(first: tuple[str, int]) -> None:
    """At the second address that it is told, without the 10 s that ``first`` would take."""
    server = CallServer(b"the call", ["127.0.0.1"])
    address, port = first
    begun_s = time.monotonic()
    key, where = bytes.fromhex(server.environment[CALL_KEY]), server.environment[CALL_ADDRESS]
    link, messages = remote_call._connect(f"{port}/{address},{where}", key, 0)
    with link:
        assert messages.receive() == b"the call"
    assert time.monotonic() - begun_s < 5
    server.close()


def test_an_address_that_drops_packets_costs_nothing(silent_address: tuple[str, int]) -> None:
    check_that_a_rank_connects(silent_address)


def test_who_is_hung_up_on_comes_again(silent_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have come from the same address, and this rank was the oldest of them; another address is silent."""
    hang_up_on_the_first(monkeypatch, 3)
    check_that_a_rank_connects(silent_address)


def test_a_caller_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_call, "_CONNECT_S", 0.2)
    with pytest.raises(StartupError, match="cannot be reached from .* at 192.0.2.1:9; HVDLITE_NETWORK"):
        remote_call._connect("9/192.0.2.1", bytes(32), 0)


def test_importing_hvdlite_stays_light() -> None:
    heavy = ("torch", "cupy", "cloudpickle", "mpi4py.MPI", "hvdlite.cli.run")
    text = f"import sys, hvdlite; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"
