"""RayExecutor: ranks as actors in a cluster of two nodes on this machine. One launch does all, in some 15 s."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("ray_job.py")


@pytest.fixture(scope="module")
def found(ray_environ: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(JOB)], env=ray_environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # Ray writes to stdout as well
    return result


def test_functions_run_on_all_ranks_of_one_job(found: dict[str, Any]) -> None:
    assert found["run"] == [[0, 0, 6.0], [1, 1, 6.0]]
    assert found["run_remote"] == [[0, 0, 9.0], [1, 1, 9.0]]
    assert found["horovod"] == [0, 1]


def test_executables_keep_their_state(found: dict[str, Any]) -> None:
    assert (found["execute"], found["execute_single"], found["execute_after"]) == ([15, 15], 20, [25, 20])


def test_variables_of_workers(found: dict[str, Any]) -> None:
    assert found["variables"] == [["1", "0", "2", "60"], ["1", "1", "2", "60"]]


def test_an_error_has_its_type_its_rank_and_its_traceback(found: dict[str, Any]) -> None:
    raised = found["raised"]
    assert {"ZeroDivisionError", "RayTaskError"} <= set(raised["types"])
    assert "repr=rank 1" in raised["text"] and "in divide" in raised["text"]
    assert (raised["rank"], raised["cause"]) == (1, "rank 1 raised ZeroDivisionError: division by zero")
    assert (found["exited"]["rank"], found["exited"]["cause"]) == (
        1,
        "rank 1 raised RuntimeError: sys.exit(3) was called",
    )


def test_workers_live_on_after_an_error(found: dict[str, Any]) -> None:
    assert found["run_after"] == [[0, 0, 12.0], [1, 1, 12.0]]
    assert found["same_processes"]


def test_an_error_of_rank_0_alone_ends_no_job(found: dict[str, Any]) -> None:
    assert found["alone"]["cause"] == "rank 0 raised AttributeError: 'Counter' object has no attribute 'no_such'"


def test_a_worker_that_is_killed_is_named_and_the_other_does_not_hang(found: dict[str, Any]) -> None:
    killed = found["killed"]
    assert "RayActorError" in killed["types"] and killed["rank"] == 1
    assert killed["cause"].startswith("the process of rank 1 has ended: killed")
    assert killed["seconds"] < 5


def test_calls_in_the_wrong_order(found: dict[str, Any]) -> None:
    assert found["started_twice"]["text"] == "RayExecutor: start() was called before; call shutdown() first"
    assert found["after_shutdown"]["text"] == "RayExecutor: no worker runs; call start() first"


@pytest.mark.parametrize("when", ["after_shutdown", "with_the_executor", "with_the_driver"])
def test_processes_are_gone(found: dict[str, Any], when: str) -> None:
    assert found[f"gone_{when}"]


def test_resources_are_given_back(found: dict[str, Any]) -> None:
    assert found["resources_back"]


def test_placement_groups(found: dict[str, Any]) -> None:
    assert found["in_a_group"] == [[0, 0, 3.0], [1, 1, 3.0]]
    text = found["in_a_spread_group"]["text"]
    assert text.startswith("RayExecutor: Ray has placed the workers on several nodes (")
    assert "between nodes hvdlite needs MPI" in text and "`hvdliterun -np 2 -H " in text


def test_one_node_must_have_room_for_all(found: dict[str, Any]) -> None:
    assert "TimeoutError" in found["too_large"]["types"]
    assert (
        "no node had room for 3 workers of 1 CPU within 2 s (placement_group_timeout_s)" in found["too_large"]["text"]
    )
    assert "nodes have 2 CPU, 0 GPU; 2 CPU, 0 GPU" in found["too_large"]["text"]
    (warning,) = found["too_large_warning"]
    assert "even if it were idle" in warning
