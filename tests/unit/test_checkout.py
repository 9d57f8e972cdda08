"""In a checkout, Python finds the sources before the installed package; they have to be of use or out of the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite

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
