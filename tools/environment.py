"""Makes the virtual environments that the README's two commands use. Needs Python and a C++ compiler, nothing else.

Each step is skipped where it is done already, so calling again is quick, and after an interruption it goes on.

.venv         torch, hvdlite (built from this tree, not linked to it) and Open MPI
.venv-mpich   MPICH alone; everything else it takes from .venv; likewise .venv-intelmpi

HVDLITE_TORCH: what to install as torch if it is not there yet, in pip's words: "torch==2.9.0", "torch --index-url ...".
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
# The version that hvdlite is tested with; whatever pip finds, where it does not exist for this Python.
TORCH = ("torch==2.13.0", "torch")
SOURCES = (
    "csrc",
    "hvdlite",
    "hvdlite_torch_backend.py",
    "hvdlite_untraced.py",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "tools/index_page.py",
)


class SetupError(Exception):
    """A sentence that says what is missing and how to get it."""


def make(extras: Sequence[str]) -> Path:
    """Make .venv with hvdlite and its ``extras``, up to date with this tree; returns its Python.

    Raises:
        SetupError: something is missing on this machine, or a step failed.
    """
    with _locked():
        _make_venv(VENV)
        if _install_hvdlite(extras):
            _compile_for_start()
    return _python(VENV)


def make_beside(extras: Sequence[str]) -> dict[str, Path]:
    """Make .venv-EXTRA for each extra, with its MPI alone, beside .venv, which must have been made; their Pythons.

    Raises:
        SetupError: a step failed.
    """
    with _locked(), ThreadPoolExecutor() as at_once:
        return dict(zip(extras, at_once.map(_make_beside, extras), strict=True))


def _make_beside(extra: str) -> Path:
    made = ROOT / f".venv-{extra}"
    _make_venv(made)
    site, base = (
        _ask(_python(venv), "import sysconfig; print(sysconfig.get_path('purelib'))") for venv in (made, VENV)
    )
    Path(site, "base.pth").write_text(base + "\n")
    if not (made / "bin" / "mpirun").exists():
        listing = "from importlib.metadata import requires; print('\\n'.join(requires('hvdlite')))"
        requirements = [
            line.split(";")[0].strip()
            for line in _ask(_python(VENV), listing).splitlines()
            if f"'{extra}'" in line.replace('"', "'")
        ]
        _pip(made, " ".join(requirements), *requirements)
    return _python(made)


def install_debian(what: str, programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install Debian's ``packages``, if this is Debian's root and ``programs`` are missing; whatever else, go on."""
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _say(what)
    for command in (["apt-get", "update", "-q"], install):
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print("\n".join([*done.stdout.splitlines()[-5:], f"no {what}: tests that need it are skipped"]), flush=True)
            return


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time: the README's two commands may be tried side by side."""
    VENV.mkdir(exist_ok=True)
    with (VENV / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is making the environment; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_venv(venv: Path) -> None:
    if _works(venv):
        return
    version = "{}.{}".format(*sys.version_info)
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"this Python ({sys.executable}) cannot make virtual environments: install python{version}-venv "
            f"(Debian, Ubuntu: apt install python{version}-venv)"
        )
    _step(
        f"making {venv.name}", sys.executable, "-m", "venv", *(["--clear"] if _python(venv).exists() else []), str(venv)
    )


def _works(venv: Path) -> bool:
    """Whether the environment has a Python that runs (the one it was made from may be gone) and has pip."""
    command = [str(_python(venv)), "-m", "pip", "--version"]
    return _python(venv).exists() and subprocess.run(command, capture_output=True).returncode == 0


def _install_torch() -> None:
    installed = "from importlib.util import find_spec; print(find_spec('torch') is not None)"
    if _ask(_python(VENV), installed) == "True":
        return
    chosen = os.environ.get("HVDLITE_TORCH")
    attempts = [shlex.split(chosen)] if chosen else [[requirement] for requirement in TORCH]
    for attempt in attempts[:-1]:
        try:
            _pip(VENV, shlex.join(attempt), *attempt)
            return
        except SetupError:
            _say(f"{shlex.join(attempt)} cannot be installed here; trying the next")
    _pip(VENV, shlex.join(attempts[-1]), *attempts[-1])


def _install_hvdlite(extras: Sequence[str]) -> bool:
    """Returns whether anything had to be done."""
    stamp = VENV / "hvdlite.json"
    try:
        done = json.loads(stamp.read_text())
    except (OSError, ValueError):
        done = {}
    native, everything = _hash(["csrc", "setup.py", "pyproject.toml"]), _hash(SOURCES)
    if done.get("sources") == everything and set(extras) <= set(done["extras"]):
        _install_torch()  # it may have been removed
        return False
    _check_compiler()
    # Built in a copy: a build leaves files behind, and would take up those that earlier builds left in the tree. The
    # copy stays, so that the extension is compiled again only where its sources changed.
    copy = VENV / "source"
    if done.get("native") != native:
        shutil.rmtree(copy, ignore_errors=True)
    _copy_sources(copy)
    stamp.unlink(missing_ok=True)
    extras = sorted({*extras, *done.get("extras", [])})
    with ThreadPoolExecutor(1) as at_once:  # what the compiler does, beside what pip unpacks
        compiled = at_once.submit(_compile, copy)
        _install_torch()
        needed = _requirements(copy, extras)
        if needed:
            _pip(VENV, "what hvdlite needs", *needed)
        compiled.result()
    requirement = f"hvdlite[{','.join(extras)}] @ file://{quote(str(copy))}"
    _pip(VENV, f"hvdlite from this tree, with {', '.join(extras)}", requirement)
    stamp.write_text(json.dumps({"sources": everything, "native": native, "extras": extras}))
    return True


def _compile(copy: Path) -> None:
    """So that to install ``copy`` has nothing to compile."""
    with tempfile.TemporaryDirectory() as directory:
        pip = [str(_python(VENV)), "-m", "pip", "--disable-pip-version-check", "wheel", "--no-input", "--no-deps"]
        _step("compiling hvdlite", *pip, "--quiet", "--wheel-dir", directory, str(copy))


def _requirements(copy: Path, extras: Sequence[str]) -> list[str]:
    """Of hvdlite with its ``extras``; none where this Python, 3.10, cannot read them: then they come with hvdlite."""
    if importlib.util.find_spec("tomllib") is None:
        return []
    import tomllib

    project = tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]


def _compile_for_start() -> None:
    """What each start imports, a third of all, which pip would take 50 s to compile; Python keeps it in __pycache__."""
    _step("compiling what each start imports", str(_python(VENV)), "-I", "-c", "import torch, hvdlite.torch")


def _copy_sources(copy: Path) -> None:
    # What was deleted from the tree must not be installed any more; the compiled extension stays.
    for stale in [copy / "hvdlite", *copy.glob("*.egg-info")]:
        shutil.rmtree(stale, ignore_errors=True)
    for stale in copy.glob("build/lib*/hvdlite/**/*"):
        if stale.is_file() and stale.suffix != ".so":
            stale.unlink()
    copy.mkdir(exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore, dirs_exist_ok=True)
        elif source.exists():
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy2(source, copy / name)


def _hash(names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _check_compiler() -> None:
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(shutil.which(shlex.split(compiler)[0]) for compiler in compilers if compiler):
        raise SetupError(
            "hvdlite has a C++ part, and there is no C++ compiler: apt install g++ (Fedora: dnf install gcc-c++)"
        )
    headers = _ask(_python(VENV), "import sysconfig; print(sysconfig.get_path('include'))")
    if not Path(headers, "Python.h").exists():
        version = sysconfig.get_python_version()
        raise SetupError(
            f"hvdlite has a C++ part, and Python's headers are not there ({headers}/Python.h): install "
            f"python{version}-dev (Debian, Ubuntu: apt install python{version}-dev; Fedora: dnf install python3-devel)"
        )


def _pip(venv: Path, what: str, *arguments: str) -> None:
    command = [str(_python(venv)), "-m", "pip", "--disable-pip-version-check", "install"]
    command += ["--no-input", "--no-compile", *arguments]
    _step(f"installing {what} into {venv.name}", *command)


def _step(title: str, *command: str) -> None:
    _say(title)
    start = time.monotonic()
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PIP_USER")
    environ = {name: value for name, value in os.environ.items() if name not in unwanted}
    status = subprocess.run(command, cwd=ROOT, env=environ).returncode
    if status != 0:
        raise SetupError(
            f"{title}: failed with exit status {status}; its output is above, the command was\n{shlex.join(command)}"
        )
    _say(f"{title}: done in {time.monotonic() - start:.0f} s")


def _ask(python: Path, program: str) -> str:
    return subprocess.run([str(python), "-I", "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)
