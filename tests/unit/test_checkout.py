"""In a checkout, Python finds the sources before the installed package; they have to be of use or out of the way.

Checkouts of different commits have the same version, and ranks that run them are told apart.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hvdlite
from hvdlite.bootstrap import start_world
from hvdlite.config import Config
from hvdlite.errors import HorovodVersionMismatchError
from hvdlite.recorder import Recorder
from hvdlite.version import exact_version

INSTALLED = Path(hvdlite.__file__).parent
WHERE = "import hvdlite, hvdlite.config as c, hvdlite._native as n; print(c.__file__, n.__file__)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Sources of a later version, which nobody has compiled."""
    sources = tmp_path / "checkout" / "hvdlite"
    shutil.copytree(INSTALLED, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (sources / "version.py").write_text('__version__ = "of the checkout"\n')
    return sources.parent


def python(directory: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=directory, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_come_from_the_installed_package(checkout: Path) -> None:
    for path in python(checkout, "-c", WHERE).split():
        assert Path(path).is_relative_to(INSTALLED)
    assert python(checkout, "-c", "import hvdlite; print(hvdlite.__version__)") == f"{hvdlite.__version__}\n"
    assert python(checkout, "-m", "hvdlite", "run", "--version") == f"hvdlite {hvdlite.__version__}\n"


def test_a_checkout_that_was_compiled_is_used(checkout: Path) -> None:
    (extension,) = INSTALLED.glob("_native.*.so")
    shutil.copy(extension, checkout / "hvdlite")
    for path in python(checkout, "-c", WHERE).split():
        assert Path(path).is_relative_to(checkout)


def test_a_sentence_where_there_is_neither(checkout: Path) -> None:
    alone = f"""
import pathlib, sys
sys.path[:] = [{str(checkout)!r}, *(entry for entry in sys.path if not pathlib.Path(entry, "hvdlite").exists())]
try:
    import hvdlite
except ImportError as error:
    print(error)
"""
    said = python(Path("/"), "-c", alone)
    assert said.startswith(f"hvdlite's compiled extension is not in {checkout}/hvdlite, and no other hvdlite is")
    assert "python3 examples/quickstart.py" in said and "python setup.py build_ext --inplace" in said


def test_the_same_sources_are_the_same_version_wherever_they_are(checkout: Path) -> None:
    (checkout / "hvdlite" / "version.py").write_bytes((INSTALLED / "version.py").read_bytes())
    (checkout / "hvdlite" / "_native.compiled.here.so").write_text("otherwise")
    assert exact_version(str(checkout / "hvdlite")) == exact_version()


def test_other_sources_are_another_version(checkout: Path) -> None:
    with (checkout / "hvdlite" / "links" / "wire.py").open("a") as wire:
        wire.write("# as of a later commit\n")
    (checkout / "hvdlite" / "version.py").write_bytes((INSTALLED / "version.py").read_bytes())
    assert exact_version(str(checkout / "hvdlite")) != exact_version()


def test_without_sources_the_version_is_all_that_is_known(tmp_path: Path) -> None:
    assert exact_version(str(tmp_path)) == exact_version(str(tmp_path / "missing")) == hvdlite.__version__


class WithAnotherCommit:
    """Rank 0 of two, of which the other one has its sources from another commit, and sends what is of no use here."""

    comm = None
    rank, size = 0, 2

    def subset(self, ranks: Sequence[int], /) -> WithAnotherCommit:
        return self

    def allgather(self, value: Any, /) -> list[Any]:
        (host, versions), complaint = value
        return [value, ((host, {**versions, "hvdlite": f"{hvdlite.__version__} (sources 01234567)"}), complaint)]

    def close(self) -> None:
        pass


def test_ranks_of_different_commits_are_refused() -> None:
    ranks, config = WithAnotherCommit(), Config()
    with pytest.raises(
        HorovodVersionMismatchError, match=r"different versions of hvdlite: .*\) on rank 0 .*67\) on rank 1"
    ):
        start_world(ranks, config, Recorder(), versions={}, news=lambda: None, on_notice=lambda _: None)
