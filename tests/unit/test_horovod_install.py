"""`python -m hvdlite horovod --install`, in an environment of its own that shares this one's packages."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Environment:
    """A virtual environment without pip, which finds the tree's hvdlite and this environment's other packages."""

    def __init__(self, directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
        self.bin = directory / "bin"
        (packages,) = directory.glob("lib/*/site-packages")
        self.packages = packages
        (packages / "base.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.bin / words[0]), *words[1:]]
        return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=120)

    def horovod(self, option: str) -> subprocess.CompletedProcess[str]:
        return self.run("python", "-m", "hvdlite", "horovod", option)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "a venv")


def test_import_and_command_until_it_is_undone(environment: Environment) -> None:
    before = sorted(environment.bin.iterdir()), sorted(environment.packages.iterdir())
    for _ in range(2):
        assert environment.horovod("--install").returncode == 0
    program = "import horovod.torch as hvd, horovod; hvd.init(); print(hvd.size(), 'hvdlite' in horovod.__version__)"
    done = environment.run("python", "-c", program)
    assert done.stdout == "1 True\n", done.stderr
    assert environment.run("horovodrun", "--version").stdout.startswith("hvdlite ")
    assert environment.horovod("--uninstall").returncode == 0
    assert "No module named 'horovod'" in environment.run("python", "-c", "import horovod").stderr
    after = sorted(environment.bin.iterdir()), sorted(environment.packages.iterdir())
    assert after == before


def test_what_is_there_already_stays(environment: Environment) -> None:
    command = environment.bin / "horovodrun"
    command.write_text("#!/bin/sh\n")
    refused = environment.horovod("--install")
    assert refused.returncode == 1
    assert f"{command} is somebody else's; remove it first" in refused.stderr
    assert environment.horovod("--uninstall").returncode == 0
    assert command.read_text() == "#!/bin/sh\n"
    command.unlink()
    (environment.packages / "horovod-0.28.1.dist-info").mkdir()
    (environment.packages / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    refused = environment.horovod("--install")
    assert "Horovod 0.28.1 is installed here, and would be found first" in refused.stderr
    assert not command.exists()


@pytest.mark.parametrize("option", ["--install", "--uninstall"])
def test_what_cannot_be_written_or_removed(environment: Environment, option: str) -> None:
    in_the_way = environment.packages / "horovod-is-hvdlite.pth"
    in_the_way.mkdir()
    failed = environment.horovod(option)
    assert failed.returncode == 1
    assert failed.stderr == f"python -m hvdlite horovod {option}: {in_the_way}: Is a directory\n"
