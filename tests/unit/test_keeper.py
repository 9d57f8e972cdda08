"""A keeper: commits outlive who hands them over, and strangers get nothing and hold nothing up."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

import keeper_lab
from hvdlite import cli
from hvdlite.cli.job import Host, Launch
from hvdlite.cli.keepers import Keepers, agent_of
from hvdlite.config import KEEPER, START
from hvdlite.links.interfaces import Interface
from hvdlite.memory.memory_file import create_memory_file, is_final, write_memory_file
from hvdlite.recovery import safekeeping
from hvdlite.recovery.keeper import MESSAGE, TO_RANKS, Word, pair_in, pair_of
from hvdlite.recovery.safekeeping import Safekeeping
from hvdlite.start import meeting_point
from hvdlite.start.meeting_point import connect
from ipv6 import has_ipv6
from keeper_lab import ENVIRON, HERE, launch_by, wait_for
from proof_lab import hang_up_on_the_first
from run_lab import executable

elsewhere = keeper_lab.elsewhere


class Job:
    """hvdliterun's end, and where ranks find the keeper."""

    def __init__(self) -> None:
        self.said: list[tuple[Word, int]] = []
        self.keepers = Keepers(Launch(("train.py",), 2), ENVIRON, 20.0, self._hear, is_local=True)
        assert self.keepers.start([HERE]) == []
        self.where = self.keepers.environment[KEEPER]

    def _hear(self, word: Word, number: int) -> int:
        self.said.append((word, number))
        return int(word == Word.CLAIM and pair_in(number) == (2, 3))


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    job = Job()
    processes = job.keepers.processes
    yield job
    job.keepers.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def run_rank_6(where: str, start: int) -> None:
    """A process that its keeper sees, and that ends before it comes to hvd.init()."""
    told = {KEEPER: where, START: str(start), "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8"}
    subprocess.run(["sleep", "2"], env={**os.environ, **told}, check=True)


def put(where: str, number: int, content: bytes) -> None:
    file = write_memory_file(lambda target: target.write(content))
    rank = Safekeeping(where)
    rank.deposit(number, file)
    rank.close()
    os.close(file)


def kept(where: str) -> tuple[int, bytes]:
    rank = Safekeeping(where)
    number, file = rank.fetch()
    rank.close()
    if file is None:
        return number, b""
    assert is_final(file)
    content = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    return number, content


def test_the_newest_commit_is_there_for_other_processes(job: Job) -> None:
    for number in (3, 4):
        put(job.where, number, b"of commit %d" % number)
    assert kept(job.where) == (4, b"of commit 4")
    assert job.keepers.ask() == []
    assert job.keepers.kept == {"localhost": 4}


def test_a_commit_is_written_while_the_rank_goes_on_and_the_next_waits_for_it(job: Job) -> None:
    put(job.where, 10, b"of commit 10")
    may_end, done = threading.Event(), []

    def slowly(target: BinaryIO) -> None:
        may_end.wait()
        done.append("written")
        target.write(b"of commit 11")

    def at_once(target: BinaryIO) -> None:
        done.append("next")
        target.write(b"of commit 12")

    rank = Safekeeping(job.where)
    rank.hand_over(11, slowly)
    assert kept(job.where) == (10, b"of commit 10")
    assert rank.news() == 0
    threading.Timer(0.2, may_end.set).start()
    rank.hand_over(12, at_once)
    assert done[0] == "written"
    rank.settle()
    assert done == ["written", "next"] and kept(job.where) == (12, b"of commit 12")
    rank.close()


def test_a_commit_that_cannot_be_kept_is_a_warning(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def fail(target: BinaryIO) -> None:
        raise TypeError("cannot pickle 'module' object")

    put(job.where, 20, b"sound")
    rank = Safekeeping(job.where)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        rank.hand_over(21, fail)
        rank.hand_over(21, fail)
        rank.settle()
    assert caplog.text.count("commit 21 is not kept outside of this process: cannot pickle") == 1
    rank.hand_over(22, lambda target: target.write(b"the next"))
    rank.close()  # settles
    assert kept(job.where) == (22, b"the next")


def test_commits_do_not_wait_again_and_again_for_a_keeper_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(where: str, purpose: bytes) -> socket.socket:
        calls.append(where)
        return connect(where, purpose)

    monkeypatch.setattr(safekeeping, "connect", count)
    monkeypatch.setattr(safekeeping, "end_if_stopped", lambda pid: False)  # as of one that is only busy
    monkeypatch.setattr(meeting_point, "PATIENCE_S", 0.1)
    job = Job()
    try:
        (keeper,) = job.keepers.processes
        rank = Safekeeping(job.where)
        os.kill(keeper, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(TimeoutError, match="it is stopped, or the host is very busy"):
                rank.news()
        assert len(calls) == 1
        with pytest.raises(TimeoutError):
            rank.begin_anew()  # what is said once is tried all the same
        assert len(calls) == 2
        os.kill(keeper, signal.SIGCONT)
        monkeypatch.setattr(meeting_point, "PATIENCE_S", 10.0)
        rank.say_starting(1, 0)  # it has answered, so all is as before
        assert rank.news() == 0 and len(calls) == 3
        rank.close()
    finally:
        job.keepers.close()


def test_what_could_still_be_changed_is_refused(job: Job) -> None:
    put(job.where, 5, b"sound")
    file = create_memory_file(100)  # sealed against shrinking, not against writing
    with pytest.raises(OSError, match="ended|gone|reset"):
        Safekeeping(job.where).deposit(6, file)
    os.close(file)
    with open(os.devnull) as no_memory, pytest.raises(OSError, match="ended|gone|reset"):
        Safekeeping(job.where).deposit(6, no_memory.fileno())
    assert kept(job.where) == (5, b"sound")


def test_strangers_get_nothing_and_hold_nothing_up(job: Job) -> None:
    put(job.where, 7, b"ours")
    name, _, _ = job.where.partition(":")
    with pytest.raises(OSError, match="key|end"):
        connect(f"{name}:{'00' * 32}", TO_RANKS)
    with pytest.raises(OSError, match="key|end"):
        connect(job.where, b"start")  # a proof for another purpose
    silent = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for link in silent:
        link.connect("\0" + name)
    for junk in (b"", b"\xff" * MESSAGE.size, MESSAGE.pack(Word.DEPOSIT, 8), MESSAGE.pack(Word.BEGIN, 0)):
        link = connect(job.where, TO_RANKS)  # of the job, but out of its mind
        link.sendall(junk)
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1) == b""
        link.close()
    assert kept(job.where) == (7, b"ours")
    for link in silent:
        link.close()


def test_news_stay_until_ranks_begin(job: Job) -> None:
    rank = Safekeeping(job.where)
    assert rank.news() == 0
    job.keepers.tell(Word.NEWS, 2)
    job.keepers.ask()  # answered after what was told
    assert rank.news() == rank.news() == 2
    job.keepers.tell(Word.BEGIN)
    job.keepers.ask()
    assert rank.news() == 0
    rank.close()


def test_what_ranks_say_reaches_hvdliterun(job: Job) -> None:
    rank = Safekeeping(job.where)
    rank.say_at_work(True)
    rank.say_at_work(False)
    assert rank.claim(2, 3) and not rank.claim(3, 2)
    rank.begin_anew()
    job.keepers.ask()
    assert [word for word, _ in job.said] == [Word.AT_WORK, Word.AT_WORK, Word.CLAIM, Word.CLAIM, Word.ANEW]
    assert [number for _, number in job.said[:2]] == [1, 0]
    rank.close()


def test_a_keeper_outlives_the_thread_that_wanted_it(elsewhere: Keepers) -> None:
    """Hosts that come while ranks train are tried on a thread, which ends with these ranks."""
    thread = threading.Thread(target=elsewhere.start, args=([HERE],))
    thread.start()
    thread.join()
    with pytest.raises(subprocess.TimeoutExpired):
        elsewhere._started[0].child.wait(0.3)
    assert elsewhere.ask() == [] and elsewhere.kept == {"localhost": 0}


def test_a_keeper_that_was_killed_makes_room_for_another() -> None:
    """The end of training is told to that one, and a start: hvdliterun would take ranks that end without for failed.

    It sees processes of ranks end that the other one was to see.
    """
    said: list[tuple[Word, int]] = []

    def hear(word: Word, number: int) -> int:
        said.append((word, number))
        return 0

    keepers = Keepers(Launch(("train.py",), 2), ENVIRON, 20.0, hear, is_local=True)
    try:
        assert keepers.start([HERE]) == []
        where = keepers.environment[KEEPER]
        keepers.tell(Word.BEGIN, 12)
        rank = Safekeeping(where)
        assert rank.news() == 0
        (killed,) = keepers.processes
        os.kill(killed, signal.SIGKILL)
        with keepers._changed:
            assert keepers._changed.wait_for(lambda: not keepers._living, 20)
        other = Safekeeping(where)
        with pytest.raises(OSError, match="refused"):
            other.news()
        with ThreadPoolExecutor(2) as ranks:
            told = [ranks.submit(rank.say_at_work, False), ranks.submit(other.say_starting, 12, 3)]
            assert keepers.start([HERE]) == []
        assert [each.result() for each in told] == [None, None]
        assert keepers.ask() == [] and {*said} == {(Word.AT_WORK, 0), (Word.STARTING, pair_of(12, 3))}
        assert killed not in keepers.processes and rank.news() == other.news() == 0
        other.close()
        rank.hand_over(5, lambda target: target.write(b"commit 5"))  # to the new one
        rank.close()
        assert kept(where) == (5, b"commit 5")
        run_rank_6(where, 12)
        wait_for(lambda: (Word.GONE, pair_of(12, 6)) in said)
    finally:
        keepers.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_keepers_call_over_ipv6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After an address that nobody has any more; for the second copy, too."""
    found = [Interface("eth0", "192.0.2.1", True, False, ("::1",))]
    monkeypatch.setattr(cli.keepers, "select", lambda spec: found)
    keepers = Keepers(launch_by(tmp_path), ENVIRON, 20.0, lambda word, number: 0, is_local=False)
    try:
        assert [address for address, _ in keepers._where] == ["::1"]
        assert keepers.start([Host("a", 1)]) == []
        assert keepers.ask() == [] and keepers.kept == {"a": 0}
        put_alone(keepers, 4, b"of commit 4")
        wait_for(lambda: keepers._copy.number == 4)
    finally:
        keepers.close()


def test_addresses_where_nobody_answers_do_not_delay_a_keeper(tmp_path: Path) -> None:
    keepers = Keepers(launch_by(tmp_path), ENVIRON, 20.0, lambda word, number: 0, is_local=False)
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    keepers._where[:0] = [one.getsockname() for one in silent]
    try:
        assert keepers.start([Host("a", 1)]) == []
    finally:
        keepers.close()
        for one in silent:
            one.close()


def test_how_long_a_keeper_may_take_to_call(tmp_path: Path) -> None:
    agent = executable(tmp_path / "agent", "exec sleep 60")
    mpirun = executable(tmp_path / "mpirun", 'echo "HYDRA build details:"; echo "    Version: 5.0.2"')
    settings = {"HVDLITE_START_TIMEOUT": "0.4", "HVDLITE_ELASTIC_TIMEOUT": "0.1", "HYDRA_LAUNCHER_EXEC": str(agent)}
    command = [sys.executable, "-m", "hvdlite", "run", "--elastic", "--mpirun", str(mpirun), "-H", "a:1", "train.py"]
    ended = subprocess.run(command, env=ENVIRON | settings, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "a: no keeper has called from there within 0.2 s" in ended.stderr


@pytest.mark.parametrize(
    ("version", "options", "has_ranks"),
    [
        ("HYDRA Version: 5.0.2", [], False),
        ("HYDRA Version: 5.0.2", ["-wdir", "/"], True),
        ("(Open MPI) 5.0.11", [], True),
    ],
)
def test_a_host_without_the_working_directory(
    version: str, options: list[str], has_ranks: bool, tmp_path: Path
) -> None:
    """Has no ranks by MPICH, whose mpirun would fail."""
    agent = executable(tmp_path / "agent", 'shift; exec sh -c "$(printf %s "$*" | sed "s,cd $PWD,cd /nowhere,")"')
    mpirun = executable(tmp_path / "mpirun", f'[ "$1" = --version ] && echo "{version}"; true')
    settings = {"HVDLITE_ELASTIC_TIMEOUT": "0.1", "HYDRA_LAUNCHER_EXEC": str(agent)}
    command = [*(sys.executable, "-m", "hvdlite", "run", "--elastic", "--mpirun", str(mpirun), "-H", "a:1"), *options]
    ended = subprocess.run(
        [*command, "train.py"], env=ENVIRON | settings, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == (0 if has_ranks else 1), ended.stderr
    assert ("a does not answer" in ended.stderr) is not has_ranks, ended.stderr


def test_a_host_without_an_answer_is_named() -> None:
    launch = Launch(("train.py",), 2, options=("--mca", "plm_rsh_agent", "false"))
    keepers = Keepers(launch, {**os.environ}, 20.0, lambda word, number: 0, is_local=True)
    try:
        assert keepers.start([Host("elsewhere", 1)]) == ["elsewhere"]
        assert keepers.kept == {}
    finally:
        keepers.close()


def test_a_keeper_that_is_hung_up_on_calls_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hvdliterun has more strangers to hear than it lets wait, and they come from the keeper's address."""
    heard = hang_up_on_the_first(monkeypatch, 2)
    keepers = Keepers(launch_by(tmp_path), ENVIRON, 20.0, lambda word, number: 0, is_local=False)
    try:
        assert keepers.start([Host("a", 1)]) == []
    finally:
        keepers.close()
    assert len(heard) > 2


def test_a_host_that_is_named_twice_has_one_keeper(elsewhere: Keepers, capfd: pytest.CaptureFixture[str]) -> None:
    assert elsewhere.start([Host("a", 1)]) == []
    assert elsewhere.start([Host("a", 1), Host("b", 1)]) == ["b"]
    assert elsewhere.kept == {"a": 0}
    said, until_s = "", time.monotonic() + 10
    while "another one of this job is here" not in said:  # it says so as it ends
        assert time.monotonic() < until_s, said
        said += capfd.readouterr().err
    elsewhere.begin_start([Host("b", 1)])
    late: list[str] = []
    wait_for(lambda: late.extend(elsewhere.give_up_late()) or bool(late))  # and is not started again at once
    assert late == ["b"]


def test_hosts_where_the_user_has_csh(tmp_path: Path) -> None:
    """Which knows neither 2>/dev/null nor NAME=value before a command: here nothing but words and quotes is known."""
    agent = tmp_path / "agent"
    agent.write_text(
        f"#!{sys.executable}\nimport os, shlex, sys\nwords = shlex.split(sys.argv[2])\nos.execvp(words[0], words)\n"
    )
    agent.chmod(0o755)
    launch = Launch(("train.py",), 2, options=("--mca", "plm_ssh_agent", str(agent)))
    keepers = Keepers(launch, ENVIRON, 20.0, lambda word, number: 0, is_local=True)
    try:
        assert keepers.start([Host("a", 1)]) == []
        assert keepers.kept == {"a": 0}
    finally:
        keepers.close()


def test_hosts_are_reached_as_mpirun_reaches_them() -> None:
    launch = Launch(("train.py",), 2, ssh=("-p", "2222"))
    assert agent_of(launch, {}) == ["ssh", "-p", "2222"]
    assert agent_of(launch, {"HYDRA_LAUNCHER_EXEC": "/opt/agent -q"}) == ["/opt/agent", "-q", "-p", "2222"]
    assert agent_of(Launch((), 2, options=("--mca", "plm_ssh_agent", "rsh : ssh")), {}) == ["rsh"]


def put_alone(keepers: Keepers, number: int, content: bytes) -> None:
    file = write_memory_file(lambda target: target.write(content))
    rank = Safekeeping(keepers.environment[KEEPER])
    rank.deposit(number, file, is_alone=True)
    rank.close()
    os.close(file)


def test_a_commit_that_one_host_alone_has_outlives_it(elsewhere: Keepers) -> None:
    content = os.urandom(3 << 20)
    assert elsewhere.start([Host("a", 1)]) == []
    put(elsewhere.environment[KEEPER], 3, content)
    put_alone(elsewhere, 4, content)
    wait_for(lambda: elsewhere.newest == 4)
    os.killpg(elsewhere.processes[0], signal.SIGKILL)
    wait_for(lambda: not elsewhere.kept)
    assert elsewhere.newest == 4
    assert elsewhere.start([Host("b", 1)]) == [] and elsewhere.kept == {"b": 0}
    assert elsewhere.hand_copy("b", lambda: False)
    assert elsewhere.kept == {"b": 4} and kept(elsewhere.environment[KEEPER]) == (4, content)


def test_ranks_may_begin_anew_on_the_machine_of_hvdliterun(elsewhere: Keepers) -> None:
    assert elsewhere.start([Host("a", 1)]) == []
    put_alone(elsewhere, 4, b"of commit 4")
    wait_for(lambda: elsewhere._copy.number == 4)
    os.killpg(elsewhere.processes[0], signal.SIGKILL)
    wait_for(lambda: not elsewhere.kept)
    assert elsewhere.start([HERE]) == [] and elsewhere.hand_copy("localhost", lambda: False)
    assert kept(elsewhere.environment[KEEPER]) == (4, b"of commit 4")


def test_a_commit_that_several_hosts_have_is_not_copied(elsewhere: Keepers) -> None:
    assert elsewhere.start([Host("a", 1)]) == []
    put_alone(elsewhere, 4, b"of commit 4")
    wait_for(lambda: elsewhere._copy.number == 4)
    put(elsewhere.environment[KEEPER], 5, b"of commit 5")
    assert elsewhere.ask() == [] and elsewhere.kept == {"a": 5}
    assert elsewhere.hand_copy("a", lambda: False)  # which has a newer one
    put_alone(elsewhere, 6, b"of commit 6")
    wait_for(lambda: elsewhere._copy.number == 6)


def test_a_host_that_ends_before_it_has_the_copy_is_given_up(elsewhere: Keepers) -> None:
    assert elsewhere.start([Host("a", 1)]) == []
    put_alone(elsewhere, 4, b"of commit 4")
    wait_for(lambda: elsewhere._copy.number == 4)
    os.killpg(elsewhere.processes[0], signal.SIGKILL)
    wait_for(lambda: not elsewhere.kept)
    assert elsewhere.start([Host("b", 1)]) == []
    (group,) = elsewhere.processes
    os.killpg(group, signal.SIGSTOP)
    assert elsewhere.hand_copy("b", lambda: True)  # hvdliterun is to end
    threading.Timer(0.2, os.killpg, (group, signal.SIGKILL)).start()
    assert not elsewhere.hand_copy("b", lambda: False)
    assert elsewhere.kept == {} and elsewhere.newest == 4


def test_hvdliterun_needs_no_copy_of_what_its_own_machine_has(job: Job) -> None:
    put_alone(job.keepers, 30, b"of commit 30")
    assert job.keepers.hand_copy("localhost", lambda: False)
    assert kept(job.where) == (30, b"of commit 30")
    assert job.keepers._copy.number == 0


def test_a_rank_that_ends_in_init_is_told_to_hvdliterun(job: Job) -> None:
    job.said.clear()
    through, ends = Safekeeping(job.where), Safekeeping(job.where)
    ends.say_starting(9, 1)
    ends.close()
    wait_for(lambda: (Word.GONE, pair_of(9, 1)) in job.said)
    through.say_starting(9, 0)
    through.say_started(9, 0)
    through.close()
    late = Safekeeping(job.where)
    late.say_starting(9, 2)
    late.close()  # whoever is not through now has a rank of this host that is
    job.keepers.ask()
    assert [word for word, _ in job.said].count(Word.GONE) == 1


def test_a_process_that_ends_before_init_is_told_to_hvdliterun(job: Job) -> None:
    job.keepers.tell(Word.BEGIN, 11)
    run_rank_6(job.where, 11)
    wait_for(lambda: (Word.GONE, pair_of(11, 6)) in job.said)
