"""How long examining the network takes, on emulated hosts: all of `hvdliterun --doctor`, and the probe of each start.

    python links_examined.py --hosts 4 --rate 1gbit     # needs root

The doctor's time is the whole command's, imports of torch on all hosts included. The probe's is that of the slowest
leader, from entering it to its end; `hvd.init()` waits for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hosts")]

from lab import Lab, refusal  # noqa: E402 (the line above makes it importable)

DOCTOR_TARGET_S, PROBE_TARGET_S = 10.0, 0.2
START = """
import time
from hvdlite import bootstrap
try_links = bootstrap.try_links
def timed(*arguments):
    start = time.perf_counter()
    try:
        return try_links(*arguments)
    finally:
        print("probe", time.perf_counter() - start, flush=True)
bootstrap.try_links = timed
import hvdlite
hvdlite.init()
hvdlite.shutdown()
"""


def command_s(lab: Lab, *words: str) -> tuple[float, str]:
    """How long `hvdlite run` with ``words`` takes on host 0, and what it prints; raises where it fails."""
    command = [*lab.enter(0), sys.executable, "-m", "hvdlite", "run", *words]
    start = time.perf_counter()
    environ = {**os.environ, **lab.launch_environment}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True).stdout
    return time.perf_counter() - start, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc says it (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    reason = refusal()
    if reason is not None:
        print(f"links_examined: {reason}", file=sys.stderr)
        return 77
    load = os.getloadavg()[0]
    doctor_s, probe_s = [], []
    with Lab(options.hosts, rate=options.rate) as lab:
        hosts = ",".join(f"{name}:1" for name in lab.names)
        for _ in range(options.rounds):
            doctor_s.append(command_s(lab, "--doctor", "-H", hosts)[0])
            _, said = command_s(lab, "--mpi", "-H", hosts, sys.executable, "-c", START)
            probe_s.append(max(map(float, re.findall(r"probe ([\d.e-]+)", said))))
    print(f"{options.hosts} emulated hosts, links of {options.rate}, load before {load:.1f}")
    for what, found, target_s in (("doctor", doctor_s, DOCTOR_TARGET_S), ("probe", probe_s, PROBE_TARGET_S)):
        print(f"{what}: median {statistics.median(found):.3f} s, most {max(found):.3f} s (target {target_s:g} s)")
    if options.json is not None:
        figures = {"hosts": options.hosts, "rate": options.rate, "load_before": load, "doctor_s": doctor_s}
        report = {"benchmark": "links_examined", **figures, "probe_s": probe_s}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
