"""Launched by test_ray.py: a cluster of two nodes on this machine, and what executors in it do, as JSON.

ray_job.py [ADDRESS]: with an address, a driver that starts an executor there, says which processes it has, and is
killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hvdlite.ray import RayExecutor

SETTINGS = RayExecutor.create_settings(timeout_s=60, placement_group_timeout_s=2)


def rank_and_sum(factor: float) -> tuple[int, int, float]:
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.local_rank(), hvd.allreduce(torch.tensor([factor * (hvd.rank() + 1)]), op=hvd.Sum).item()


def rank_of_horovod() -> int:
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank()


def fail(how: Callable[[], object]) -> None:
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        how()
    hvd.allreduce(torch.ones(1))


def divide() -> float:
    return 1 / 0


class Counter:
    def __init__(self, first: int, *, step: int) -> None:
        self.count, self.step = first, step

    def next(self) -> int:
        self.count += self.step
        return self.count


def pid(_: object) -> int:
    return os.getpid()


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        cause = error.__cause__
        return {
            "types": [kind.__name__ for kind in type(error).__mro__],
            "text": str(error),
            "cause": str(cause),
            "rank": getattr(cause, "rank", None),
            "seconds": time.monotonic() - start,
        }
    raise AssertionError("no error")


def are_gone(pids: list[int]) -> bool:
    return comes_true(lambda: not any(Path(f"/proc/{p}").exists() for p in pids))


def comes_true(condition: Callable[[], bool]) -> bool:
    """Within 20 s."""
    end = time.monotonic() + 20
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return is_true


@ray.remote(num_cpus=0)
def inside(spread: bool) -> Any:
    """In a placement group."""
    executor = RayExecutor(SETTINGS, num_workers=2)
    if spread:
        return attempt(executor.start)
    with executor:
        return executor.run(rank_and_sum, args=[1.0])


def in_placement_group(strategy: str) -> Any:
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy=strategy)
    try:
        where = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        return ray.get(inside.options(scheduling_strategy=where).remote(strategy == "STRICT_SPREAD"))
    finally:
        ray.util.remove_placement_group(group)


def killed_driver() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False)
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start()
    print(json.dumps(executor.execute(pid)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import_module("hvdlite.compat.horovod")  # as for a program of Horovod's

    found: dict[str, Any] = {}
    os.environ["OMPI_COMM_WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_RANK"] = "7"  # as where mpirun has started Ray
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        del os.environ[name]
    ray.init(address=cluster.address, log_to_driver=False)
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start(executable_cls=Counter, executable_args=[10], executable_kwargs={"step": 5}, extra_env_vars={"A": 1})
    pids = executor.execute(pid)
    found["run"] = executor.run(rank_and_sum, kwargs={"factor": 2.0})
    found["run_remote"] = ray.get(executor.run_remote(rank_and_sum, args=[3.0]))
    found["horovod"] = executor.run(rank_of_horovod)
    found["execute"] = executor.execute(lambda counter: counter.next())
    found["execute_single"] = executor.execute_single(lambda counter: counter.next())
    found["execute_after"] = executor.execute(lambda counter: counter.next())
    names = ("A", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HVDLITE_START_TIMEOUT")
    found["variables"] = executor.run(lambda: [os.environ.get(name) for name in names])
    found["raised"] = attempt(lambda: executor.run(fail, args=[divide]))
    found["exited"] = attempt(lambda: executor.run(fail, args=[lambda: sys.exit(3)]))
    found["alone"] = attempt(lambda: executor.execute_single(lambda counter: counter.no_such))
    found["run_after"] = executor.run(rank_and_sum, args=[4.0])
    found["same_processes"] = executor.execute(pid) == pids
    found["killed"] = attempt(lambda: executor.run(fail, args=[lambda: os.kill(os.getpid(), signal.SIGKILL)]))
    found["started_twice"] = attempt(executor.start)
    executor.shutdown()
    executor.shutdown()
    found["gone_after_shutdown"] = are_gone(pids)
    found["after_shutdown"] = attempt(lambda: executor.run(rank_and_sum, args=[1.0]))

    with RayExecutor(None, num_hosts=1, num_workers_per_host=2) as another:
        pids = another.execute(pid)
    another.start()
    pids += another.execute(pid)
    del another
    found["gone_with_the_executor"] = are_gone(pids)
    driver = subprocess.run([sys.executable, __file__, cluster.address], capture_output=True, text=True, timeout=60)
    found["gone_with_the_driver"] = are_gone(json.loads(driver.stdout))
    found["resources_back"] = comes_true(lambda: ray.available_resources().get("CPU") == 4.0)

    found["in_a_group"] = in_placement_group("STRICT_PACK")
    found["in_a_spread_group"] = in_placement_group("STRICT_SPREAD")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["too_large"] = attempt(RayExecutor(SETTINGS, num_workers=3).start)
    found["too_large_warning"] = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    killed_driver() if len(sys.argv) > 1 else main()
