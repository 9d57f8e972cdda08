"""Runs a benchmark across emulated hosts of this machine, whose links are as slow as wanted; needs root.

    python across_hosts.py --hosts 2 --ranks 1 --rate 1gbit overlap.py

Hosts are network namespaces (tests/hosts/lab.py). What they send each other crosses a shaped link, but they share the
cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hosts")]

from lab import Lab, refusal  # noqa: E402 (the line above makes it importable)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=1, help="per host (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc says it (default: %(default)s)")
    parser.add_argument(
        "--delay", type=float, default=0, metavar="US", help="of a packet between two hosts, besides (default: none)"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="and its arguments")
    options = parser.parse_args()
    if not options.script:
        parser.error("which benchmark?")
    reason = refusal()
    if reason is not None:
        print(f"across_hosts: {reason}", file=sys.stderr)
        return 77
    with Lab(options.hosts, rate=options.rate, delay_us=options.delay) as lab:
        hosts = ",".join(f"{name}:{options.ranks}" for name in lab.names)
        delay = f" and {options.delay:g} us" if options.delay else ""
        print(f"{options.hosts} emulated hosts x {options.ranks} rank(s), links of {options.rate}{delay}", flush=True)
        command = [sys.executable, "-m", "hvdlite", "run", "--mpi", "-H", hosts, *options.script]
        return subprocess.run([*lab.enter(0), *command], env={**os.environ, **lab.launch_environment}).returncode


if __name__ == "__main__":
    sys.exit(main())
