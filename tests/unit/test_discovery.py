"""What `--host-discovery-script` may print, and what is made of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from hvdlite.cli import discovery
from hvdlite.cli.discovery import Discovery, IsOver, printed_hosts, slots_of
from hvdlite.cli.elastic import Elasticity
from hvdlite.cli.job import Host
from hvdlite.errors import ConfigError
from hvdlite.processes import is_zombie


def script(directory: Path, body: str) -> str:
    path = directory / "discover.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "slots"),
    [
        ("echo localhost:4", 4),
        ("echo localhost", 3),
        ("echo 127.0.0.1:1; hostname", 4),
        ("true", 0),
        ("echo '# hosts'; echo 'localhost:2 # here'", 2),
        ("echo localhost:0", 0),
    ],
)
def test_slots_of_this_machine(tmp_path: Path, body: str, slots: int) -> None:
    assert slots_of(script(tmp_path, body), 3) == slots


@pytest.mark.parametrize(("answers", "slots"), [(["", "localhost:2"], 2), (["", "", "localhost:2"], 0)])
def test_no_host_counts_if_it_is_said_twice(
    tmp_path: Path, answers: list[str], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_EVERY_S", 0.0)
    for number, answer in enumerate(answers):
        (tmp_path / f"{number}.answer").write_text(answer)
    takes_turns = f'cd {tmp_path}; next=$(ls *.answer | head -n 1); cat "$next"; rm "$next"'
    assert slots_of(script(tmp_path, takes_turns), 1) == slots


def test_a_host_may_stand_on_several_lines() -> None:
    assert printed_hosts("a:2\nb\na:1\na\n", 2) == (Host("a", 5), Host("b", 2))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("echo localhost:2; echo elsewhere:2", "names elsewhere: ranks may come and go on this machine only"),
        ("echo localhost:many", "'localhost:many' is not a host"),
        ("echo localhost:2; echo -oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("echo localhost:1; echo '[fd00::2]:2'", "fd00::2.* is an address of IPv6, .* give a name that leads there"),
        ("echo 'a b;c'", "'a b;c' is not a host"),
        ("printf '\\377'", "is not a host"),
        ("echo localhost:\u00b2", "is not a host"),
        ("exit 3", "exit status 3"),
    ],
)
def test_what_makes_no_sense_is_said(tmp_path: Path, body: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        slots_of(script(tmp_path, body), 1)
    with pytest.raises(ConfigError, match="No such file"):
        slots_of(str(tmp_path / "missing"), 1)


def test_a_missing_interpreter_is_said(tmp_path: Path) -> None:
    path = tmp_path / "discover.py"
    path.write_text("#!/missing/python\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="discover.py: what its first line names is missing"):
        slots_of(str(path), 1)


HANGS = 'sleep 100 &\necho $! >"$0.pid"; wait'


def process_in(path: Path) -> int:
    """The one that the script has started."""
    while not (path.exists() and path.read_text().strip()):
        time.sleep(0.01)
    return int(path.read_text())


def test_a_script_that_hangs_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_LIMIT_S", 0.2)
    hangs = script(tmp_path, HANGS)
    with pytest.raises(ConfigError, match="timed out after 0.2 seconds"):
        slots_of(hangs, 1)
    assert has_gone(process_in(Path(f"{hangs}.pid")))


def test_a_script_that_hangs_ends_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_EVERY_S", 0.001)
    hangs = script(tmp_path, HANGS)
    told: list[object] = []
    looker = Discovery(lambda is_over: slots_of(hangs, 1, is_over), told.append)
    looker.start()
    process = process_in(Path(f"{hangs}.pid"))
    looker.close()
    assert has_gone(process) and told == []


def has_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            if is_zombie(pid):  # nobody may take note of it here
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_only_changes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_EVERY_S", 0.001)
    answers = iter([2, 2, 3, ConfigError("broken"), ConfigError("broken"), 3, 1])
    told: list[int | str] = []
    is_over = threading.Event()

    def look(_: IsOver) -> int:
        answer = next(answers, None)
        if answer is None:
            is_over.set()
            return 1
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    looker = Discovery(look, lambda found: told.append(found if isinstance(found, int) else str(found)))
    looker.start()
    assert is_over.wait(10)
    looker.close()
    assert told == [2, 3, "broken", 3, 1]


def test_how_many_ranks_are_wanted() -> None:
    assert [Elasticity(2, 0, most=4).wanted(slots) for slots in range(6)] == [2, 2, 2, 3, 4, 4]
    assert Elasticity(1, 0).wanted(9) == 9
