"""What RayExecutor says of its arguments, for which it needs no Ray."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from hvdlite.errors import ConfigError, StartupError
from hvdlite.ray import RayExecutor, Settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_hosts": 2, "num_workers_per_host": 4}, "2 hosts, and between nodes hvdlite needs MPI"),
        ({"num_hosts": 2, "num_workers_per_host": 4}, "`hvdliterun -np 8 -H "),
        ({"num_workers": 2, "num_hosts": 1}, "not both"),
        ({}, "0 workers; pass num_workers"),
        ({"min_workers": 2}, "ranks of a job of hvdlite do not change"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker without use_gpu=True"),
        ({"num_workers": 2, "gpus_per_worker": 0, "use_gpu": True}, "must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_those_that_contradict_one_another_are_value_errors() -> None:
    with pytest.raises(ValueError, match="not both"):
        RayExecutor(None, num_workers=2, num_hosts=1)
    assert issubclass(ConfigError, ValueError)


def test_settings() -> None:
    assert RayExecutor.create_settings(5, "key", "text", 7, {"eth0"}) == Settings(5, 7, frozenset({"eth0"}))


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it() -> None:
    with pytest.raises(StartupError, match=r"hvdlite.ray needs Ray .*: pip install 'hvdlite\[ray\]'"):
        RayExecutor(None, num_workers=2).start()


def test_horovods_module_leads_here_and_imports_no_ray() -> None:
    program = (
        "import hvdlite.compat.horovod, sys; from horovod.ray import RayExecutor; import hvdlite.ray; "
        "assert RayExecutor is hvdlite.ray.RayExecutor; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
