"""`horovod` that is hvdlite: its modules and names, how it is asked for, and that it comes only when asked for."""

from __future__ import annotations

import inspect
import os
import py_compile
import subprocess
import sys
import zipapp
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import hvdlite
import hvdlite.torch as hvd
from hvdlite.compat import runner
from hvdlite.compat.data import AsyncDataLoaderMixin, BaseDataLoader
from hvdlite.errors import ConfigError

START = [sys.executable, "-m", "hvdlite", "horovod"]


def run(*command: str, cwd: Path | str = "/", path: Path | str = "") -> str:
    """What ``command`` prints; ``path`` goes before all else that Python searches."""
    search = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(directory: Path, text: str) -> str:
    path = directory / "train.py"
    path.write_text(text)
    return str(path)


NAMES = """
import importlib, importlib.util, sys
import horovod
import horovod.torch as hvd
import hvdlite, hvdlite.torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import ccl_built, env, gloo_built, gpu_available, mpi_built, nccl_built, split_list
from horovod.runner.util.threads import in_thread
from horovod.torch.compression import Compression, NoneCompressor
from horovod.torch.functions import broadcast_object, broadcast_parameters
from horovod.torch.mpi_ops import Average, allreduce_async_, poll, rank, synchronize
from horovod.torch.mpi_ops import check_installed_version, gpu_available, num_rank_is_power_2
from horovod.torch.mpi_ops import handle_average_backwards_compatibility as chosen
from horovod.torch.optimizer import DistributedOptimizer, _DistributedOptimizer
from hvdlite.compat.horovod import MODULES

assert HorovodInternalError is hvd.HorovodInternalError is hvdlite.HorovodInternalError
assert synchronize is hvdlite.torch.synchronize is hvd.mpi_ops.synchronize
assert Compression is hvd.Compression and DistributedOptimizer is hvd.DistributedOptimizer is _DistributedOptimizer
assert isinstance(hvd.global_process_set, ProcessSet) and global_process_set is hvd.global_process_set
assert mpi_built(verbose=True) is True and gloo_built() is False and nccl_built() == hvd.nccl_built()

# All names of the page; those that hvdlite.torch has not yet come by themselves.
assert set(hvdlite.torch.__all__) <= set(dir(hvd))
everything = {}
exec("from horovod.torch import *", everything)
assert set(hvdlite.torch.__all__) <= everything.keys()
assert not hasattr(hvd, "added_later")
hvdlite.torch.added_later = 7
assert hvd.added_later == 7
from horovod.torch.mpi_ops import added_later

# Packages can be asked for what they have without being imported, and others are not there.
assert importlib.util.find_spec("horovod").name == "horovod"
assert importlib.util.find_spec("horovod.torch.mpi_ops") is not None
import horovod.tensorflow as without_tensorflow
without_tensorflow.init()
sets = without_tensorflow.mpi_ops._basics._get_process_set_ids_and_ranks()
assert sets == hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}
assert not hasattr(without_tensorflow, "allreduce") and not hasattr(without_tensorflow, "DistributedOptimizer")
assert importlib.util.find_spec("horovod.no_such") is None
for module, words in [
    ("mxnet", "PyTorch only"), ("spark.torch", "hvdlite.run"), ("ray.elastic", "hvdliterun"),
    ("runner.common.util.settings", "hvdliterun"), ("torch.mpi_lib_v2", "horovod.torch"),
]:
    try:
        importlib.import_module(f"horovod.{module}")
    except ModuleNotFoundError as error:
        assert error.name.startswith("horovod.") and words in str(error), error
    else:
        raise AssertionError
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.util import _cache, check_installed_version, get_average_backwards_compatibility_fun
from horovod.common.util import is_version_greater_equal_than
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.torch.elastic.state import StateHandler, TorchState, get_handler_registry, set_handler_registry
from horovod.torch.elastic.state import LRSchedulerStateHandler, ModelStateHandler, OptimizerStateHandler
from horovod.torch.elastic.state import SamplerStateHandler
try:
    hvd.no_such_name
except AttributeError as error:
    assert "horovod.torch.no_such_name: hvdlite, which stands in" in str(error)
else:
    raise AssertionError
try:
    from horovod.torch.mpi_ops import no_such_name
except ImportError as error:
    assert "no_such_name" in str(error) and "hvdlite" in str(error), error
else:
    raise AssertionError
assert chosen(None, None) is chosen(hvd.Average, None) is Average and chosen(hvd.Sum, None) is hvd.Sum
import cloudpickle, copy
assert cloudpickle.loads(cloudpickle.dumps(lambda: hvd))() is hvd is copy.deepcopy(hvd)
missing = [name for name in MODULES if "elastic" not in name and importlib.import_module(name).__name__ != name]
assert not missing, missing

# horovod.run is a function, and a module with that function.
from horovod.run import run as first
from horovod.runner import run as second
assert first is second is horovod.run.run and callable(horovod.run)
assert tuple(map(int, horovod.__version__.split("+")[0].split("."))) >= (0, 28)

hvd.init()
assert (hvd.rank(), rank(), horovod.rank(), hvd.size()) == (0, 0, 0, 1)
print("ok")
"""


def test_modules_and_names(tmp_path: Path) -> None:
    assert run(*START, script(tmp_path, NAMES)) == "ok\n"


def test_by_an_import(tmp_path: Path) -> None:
    assert run(sys.executable, script(tmp_path, "import hvdlite.compat.horovod\n" + NAMES)) == "ok\n"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A directory with a package that plays the real Horovod."""
    package = tmp_path / "installed" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = 'real'\n")
    (package / "tensorflow.py").write_text("")
    return package.parent


def test_ours_wins_where_horovod_is_installed(tmp_path: Path, real: Path) -> None:
    text = "import horovod\nassert 'hvdlite' in horovod.__version__\nimport horovod.runner\nprint(horovod.runner.run)"
    assert "hvdlite" not in run(sys.executable, "-c", "import horovod; print(horovod.__version__)", path=real)
    assert "function run" in run(*START, script(tmp_path, text), path=real)


def test_hvdlite_alone_leaves_horovod_as_it_is(real: Path) -> None:
    text = "import hvdlite, horovod; print(horovod.__version__)"
    assert run(sys.executable, "-c", text, path=real) == "real\n"


def test_too_late(real: Path) -> None:
    text = "import horovod\ntry: import hvdlite.compat.horovod\nexcept ImportError as error: print(error)"
    said = run(sys.executable, "-c", text, path=real)
    assert "horovod has been imported already, from" in said and "python -m hvdlite horovod" in said


AS_PYTHON_DOES = """
from __future__ import annotations
import atexit, pickle, sys, __main__
import neighbour

class Config:
    value: no_such_name = 3

assert __name__ == "__main__" and __main__.Config is Config and __file__.startswith(sys.argv[0])
assert type(pickle.loads(pickle.dumps(Config()))) is Config
atexit.register(lambda: print("at the end", __main__.Config.value))
print(sys.argv[1:], neighbour.WHERE)
sys.exit(0)
"""


def test_a_script_runs_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WHERE = 'beside the script'\n")
    path = script(tmp_path, AS_PYTHON_DOES)
    expected = "['-m', 'x'] beside the script\nat the end 3\n"
    assert run(sys.executable, path, "-m", "x") == expected
    assert run(*START, path, "-m", "x") == expected


def test_futures_of_ours_are_not_the_scripts(tmp_path: Path) -> None:
    """compile() passes on the __future__ statements of the module that calls it."""
    text = "def f(x: int): pass\nprint(f.__annotations__['x'] is int)"
    assert run(*START, script(tmp_path, text)) == "True\n"


@pytest.mark.parametrize("kind", ["directory", "zip", "compiled"])
def test_what_else_python_runs(kind: str, tmp_path: Path) -> None:
    application = tmp_path / "application"
    application.mkdir()
    (application / "neighbour.py").write_text("WHERE = 'beside'\n")
    main = application / "__main__.py"
    main.write_text(AS_PYTHON_DOES)
    if kind == "zip":
        zipapp.create_archive(application, tmp_path / "application.pyz")
        application = tmp_path / "application.pyz"
    elif kind == "compiled":
        py_compile.compile(str(main), str(application / "train.pyc"))
        application = application / "train.pyc"
    expected = "['-m', 'x'] beside\nat the end 3\n"
    assert run(sys.executable, str(application), "-m", "x") == expected
    assert run(*START, str(application), "-m", "x") == expected


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys, horovod.runner\nprint(__name__, sys.argv[1:], horovod.runner.run)\n")
    assert run(*START, "-m", "job", "--lr", "1", cwd=tmp_path).startswith("__main__ ['--lr', '1'] ")


def test_a_module_by_the_command_hvdlite(tmp_path: Path) -> None:
    """Which is in a directory of its own, that `python -m` does not search."""
    (tmp_path / "bin").mkdir()
    command = script(tmp_path / "bin", "import sys\nfrom hvdlite.__main__ import main\nsys.exit(main())\n")
    (tmp_path / "job.py").write_text("import sys, horovod.runner\nprint(sys.argv[1:])\n")
    assert run(sys.executable, command, "horovod", "-m", "job", "--lr", "1", cwd=tmp_path) == "['--lr', '1']\n"


def test_pytest_files(tmp_path: Path) -> None:
    text = "import horovod.torch as hvd\ndef test_it():\n    hvd.init()\n    assert hvd.size() == 1\n"
    (tmp_path / "test_it.py").write_text(text)
    said = run(*START, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert "1 passed" in said


SPAWNS = """
from multiprocessing import get_context
import horovod

def check():
    assert "hvdlite" in horovod.__version__

if __name__ == "__main__":
    worker = get_context("spawn").Process(target=check)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


def test_spawned_workers_have_it_too(tmp_path: Path, real: Path) -> None:
    assert run(*START, script(tmp_path, SPAWNS), path=real) == "0\n"


@pytest.mark.parametrize(("words", "status"), [([], 2), (["-m"], 2), (["--help"], 0)])
def test_usage(words: list[str], status: int) -> None:
    done = subprocess.run([*START, *words], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == status
    assert done.stdout.startswith("usage: python -m hvdlite horovod")


def test_no_such_script() -> None:
    for words, text in [(["none.py"], "cannot read none.py: No such file"), (["none"], "neither a script nor -m")]:
        done = subprocess.run([*START, *words], capture_output=True, text=True, timeout=60, cwd="/")
        assert done.returncode != 0
        assert text in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["-m", "this"], ["/train.py"]])
def test_a_directory_that_is_gone(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    done = subprocess.run([*START, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "python -m hvdlite horovod: the working directory has been removed: change to one that is there\n",
    )


def test_builds_before_init() -> None:
    assert hvd.mpi_built() is True
    assert (hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built()) == (False,) * 4
    assert (hvd.cuda_built(), hvd.rocm_built()) == (True, False)
    assert isinstance(hvd.nccl_built(), int)  # see test_nccl_library.py
    if not hvdlite.is_initialized():
        with pytest.raises(hvdlite.NotInitializedError, match="call hvd.init"):
            hvd.mpi_threads_supported()


# In the order of Horovod 0.28.1, whose callers may pass them by position.
ARGUMENTS_OF_RUN = """
func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi
mpi_args network_interface network_interfaces executable np min_np max_np
"""


def test_arguments_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(inspect.signature(runner.run).parameters) == ARGUMENTS_OF_RUN.split()
    with pytest.raises(ConfigError, match="no rank can be replaced"):
        runner.run(print, num_proc=2, host_discovery_script="hosts.sh")
    monkeypatch.setattr(hvdlite, "run", lambda *args, options, **others: options)
    assert runner.run(print) == []
    assert runner.run(print, network_interfaces=["eth0", "eth1"]) == ["--network-interfaces=eth0,eth1"]
    assert runner.run(print, network_interface="eth0", use_mpi=True) == ["--network-interfaces=eth0", "--mpi"]
    assert runner.run(print, min_num_proc=1, cooldown_range=(60, 300)) == [
        "--min-num-proc=1",
        "--blacklist-cooldown-range=60,300",
    ]


def test_a_rank_s_exception_is_a_runtime_error_as_in_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(hvdlite, "run", fail)
    error: Exception = ValueError("the loss is not a number")
    with pytest.raises(RuntimeError, match="a rank raised ValueError: the loss is not a number") as caught:
        runner.run(print)
    assert caught.value.__cause__ is error
    error = hvdlite.RankFailedError(1, "rank 1 died")
    with pytest.raises(hvdlite.RankFailedError):
        runner.run(print)


def test_average_and_op() -> None:
    from hvdlite.compat.common import get_average_backwards_compatibility_fun

    chosen = get_average_backwards_compatibility_fun(hvd)
    assert chosen(None, None) is hvd.Average
    assert chosen(hvd.Max, None) is hvd.Max
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert chosen(None, False) is hvd.Sum
    with pytest.warns(DeprecationWarning, match="pass op"):
        assert chosen(None, True) is hvd.Average
    with pytest.raises(ValueError, match="both given"):
        chosen(hvd.Sum, True)


def test_versions() -> None:
    from hvdlite.compat.common import check_installed_version, is_version_greater_equal_than

    for version, target, expected in [
        ("2.13.0+cpu", "2.9.0", True), ("2.9", "2.9.0", True), ("2.9.0rc1", "2.9.0", False), ("2.8.9", "2.9.0", False),
        ("3.0.0.dev1", "2.9.0", True), ("v2.9.1", "2.9.0", True),
    ]:  # fmt: skip
        assert is_version_greater_equal_than(version, target) is expected, version
    for wrong in [("2.9.0", "2.9"), (2, "2.9.0"), ("new", "2.9.0")]:
        with pytest.raises(ValueError, match="version"):
            is_version_greater_equal_than(*wrong)  # type: ignore[arg-type]
    check_installed_version("torch", metadata.version("torch"))
    with pytest.warns(UserWarning, match="torch: version 1.0 runs, but"):
        check_installed_version("torch", "1.0")
    cause = ImportError("no symbol")
    with pytest.raises(hvdlite.HorovodVersionMismatchError, match="torch: version 1.0 runs") as caught:
        check_installed_version("torch", "1.0", cause)
    assert caught.value.__cause__ is cause


def test_a_cache_calls_once() -> None:
    from hvdlite.compat.common import _cache

    calls = []
    cached = _cache(lambda x, y=0: calls.append((x, y)) or x + y)
    assert (cached(1), cached(1), cached(1, y=2)) == (1, 1, 3)
    assert calls == [(1, 0), (1, 2)]


class Batches(BaseDataLoader):
    def __init__(self, batches: list[int], error: Exception | None = None) -> None:
        self.batches, self.error = batches, error

    def __len__(self) -> int:
        return len(self.batches)

    def _iterate(self) -> Iterator[int]:
        yield from self.batches
        if self.error is not None:
            raise self.error

    def _process_batch(self, batch: int) -> int:
        return -batch


class AsyncBatches(AsyncDataLoaderMixin, Batches):
    pass


@pytest.mark.parametrize("size", [0, 1, 5])
def test_batches_of_a_thread(size: int) -> None:
    loader = AsyncBatches(size, [1, 2, 3])
    assert [list(loader) for _ in range(3)] == [[-1, -2, -3]] * 3
    loader.close_async_loader()
    loader.close_async_loader()
    assert not loader.thread.is_alive()
    assert len(loader) == 3


def test_what_a_loader_raises_comes_out_and_a_full_one_can_be_closed() -> None:
    failing = AsyncBatches(1, [1], error=ValueError("of the data"))
    with pytest.raises(ValueError, match="of the data"):
        list(failing)
    failing.close_async_loader()
    full = AsyncBatches(1, [1, 2, 3])
    assert next(iter(full)) == -1
    full.close_async_loader()
    assert not full.thread.is_alive()


def test_the_elastic_loop_with_functions_of_one_s_own() -> None:
    from hvdlite.compat.elastic import ObjectState, run_fn

    resets: list[int] = []
    state = ObjectState(lambda values: dict(values), lambda: 0, batch=0)

    def train(state: ObjectState) -> int:
        state.batch += 1
        if len(resets) < 2:
            raise hvdlite.HorovodInternalError("a collective failed")
        return state.batch

    assert run_fn(train, lambda: resets.append(1))(state) == 1  # each time from the last commit
    assert len(resets) == 2

    def die(state: ObjectState) -> None:
        state.batch = 7
        raise hvdlite.RankFailedError(1, "rank 1 died")

    with pytest.raises(hvdlite.UnrecoverableError, match="rank 1 died"):
        run_fn(die, lambda: resets.append(1))(state)
    assert state.batch == 1


def test_small_functions() -> None:
    from hvdlite.compat.common import env, is_iterable, num_rank_is_power_2, split_list

    assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert split_list([], 2) == [[], []]
    assert [n for n in range(10) if num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert is_iterable("") and not is_iterable(1)
    os.environ["HVDLITE_TEST_SET"] = "before"
    try:
        with env(HVDLITE_TEST_SET="1", HVDLITE_TEST_NEW="2", HVDLITE_TEST_NONE=None):
            assert (os.environ["HVDLITE_TEST_SET"], os.environ["HVDLITE_TEST_NEW"]) == ("1", "2")
            assert "HVDLITE_TEST_NONE" not in os.environ
        assert os.environ["HVDLITE_TEST_SET"] == "before" and "HVDLITE_TEST_NEW" not in os.environ
    finally:
        del os.environ["HVDLITE_TEST_SET"]
