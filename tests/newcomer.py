"""Does what the README says, as printed, in order, as somebody would who has just cloned: python3 tests/newcomer.py

Makes a clean clone of what is committed. There it runs the commands of the README, block by block in one shell, and
the whole programs that it shows: with an empty home directory, with the system's Python and PATH, and in a namespace of
mounts that hides caches of pip and compilers. Says of each block what happened. `--page docs/start.md` takes another
page. Takes minutes, since it installs torch and compiles twice, and needs pip's registry; so no suite has it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from blocks import Block, blocks_of  # noqa: E402 (the line above makes it importable)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How this machine reaches pip's registry is not the newcomer's doing.
KEPT = re.compile(r"PIP_(?!CACHE)\w+|\w+_proxy|SSL_CERT_\w+|LANG", re.IGNORECASE)
HIDDEN = (".cache", ".ccache", ".pip", ".local")
# Where the program comes from that a page calls train.py; by default it is the page's own first one.
TRAIN = {"README.md": "docs/from-horovod.md"}
TORCH = "pip install torch\n"
LEFT_OUT = {"python3 tests/run.py": "the tests take a while; --all runs them"}
_SAYS = re.compile(r"^# ((?:python -m hvdlite run|hvdliterun) .*?(\w+\.py))$")
_MARK = "newcomer's mark"


class Shell:
    """A bash in which blocks run one after the other, in the clone; a new one after a block that ends it."""

    def __init__(self, place: Path, environ: dict[str, str]) -> None:
        self._arguments = (place, environ)
        self._output = place.parent / "output"
        self._child: subprocess.Popen[str] | None = None

    def run(self, commands: str) -> tuple[int, str]:
        """Exit status and output of ``commands``, which end at the first that fails."""
        place, environ = self._arguments
        script = place.parent / "block"
        script.write_text(commands + "\n")
        self._output.write_text("")
        if self._child is None or self._child.poll() is not None:
            command = ["bash", "--noprofile", "--norc"]
            self._child = subprocess.Popen(
                command, cwd=place, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        words = f"set -e; . '{script}' >'{self._output}' 2>&1 </dev/null; set +e; echo \"{_MARK}\""
        self._child.stdin.write(words + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        status = 0 if line.strip() == _MARK else self._child.wait()
        return status, self._output.read_text()

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", default="README.md")
    parser.add_argument("--all", action="store_true", help="also the tests")
    parser.add_argument(
        "--torch", metavar="WORDS", help="what to install as torch, as torch==2.13.0; pip's default has CUDA"
    )
    options = parser.parse_args()
    if os.environ.get("HVDLITE_NEWCOMER") is None:
        return in_namespace()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as directory:
        clone, home = Path(directory, "hvdlite"), Path(directory, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        page = ROOT / TRAIN.get(options.page, options.page)
        for block in [block for block in blocks_of(page) if block.language == "python"][:1]:
            (clone / "train.py").write_text(block.text)
        environ = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
        environ |= {"HOME": str(home), "PATH": PATH, "TMPDIR": directory}
        shell = Shell(clone, environ)
        try:
            results = [follow(block, shell, clone, options) for block in blocks_of(ROOT / options.page)]
        finally:
            shell.close()
    failed = results.count(False)
    print(
        f"{results.count(True)} blocks did what the page says, {failed} did not, {results.count(None)} were only read"
    )
    return 1 if failed else 0


def in_namespace() -> int:
    """This program once more, where caches of the home directory are empty."""
    hide = "; ".join(f'[ ! -d "$HOME/{name}" ] || mount -t tmpfs none "$HOME/{name}"' for name in HIDDEN)
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    words = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    command = ["unshare", *root, "--mount", "sh", "-c", f'{hide}; exec "$@"', "sh", *words]
    return subprocess.run(command, env={**os.environ, "HVDLITE_NEWCOMER": "1"}).returncode


def follow(block: Block, shell: Shell, clone: Path, options: argparse.Namespace) -> bool | None:
    """Do what ``block`` says, and say what came of it; None: nothing is to be done."""
    print(f"\n==> {block} ({block.language or 'commands'}): {block.first_line}", flush=True)
    commands = block.commands
    if block.language == "python":
        says = _SAYS.match(block.first_line)
        if says is None:
            print("    a piece of a program; tests/docs runs it")
            return None
        (clone / says[2]).write_text(block.text)
        commands = says[1]
        print(f"    saved as {says[2]}: {commands}")
    elif block.language not in ("", "sh", "console"):
        print("    nothing to run")
        return None
    if not options.all and commands in LEFT_OUT:
        print(f"    left out: {LEFT_OUT[commands]}")
        return None
    if options.torch and TORCH in commands:
        print(f"    not as printed: pip install {options.torch}")
        commands = commands.replace(TORCH, f"pip install {options.torch}\n")
    start = time.monotonic()
    status, output = shell.run(commands)
    elapsed_s = time.monotonic() - start
    said = output.splitlines()
    if status:
        print(f"    FAILED with exit status {status} after {elapsed_s:.0f} s:", *said[-30:], sep="\n    | ")
        return False
    missing = [line for line in block.output if line not in said] if block.language == "console" else []
    if missing:
        print(f"    FAILED: ran for {elapsed_s:.0f} s, and did not print", *missing, sep="\n    | ")
        return False
    print(f"    done in {elapsed_s:.0f} s; the end of what it printed:", *said[-4:], sep="\n    | ")
    return True


if __name__ == "__main__":
    sys.exit(main())
