"""A Slurm of one node on this machine, for tests: munged, slurmctld and slurmd, with everything in one directory.

Nothing of a Slurm that is installed here is touched: the daemons have configuration, keys, sockets and ports of their
own, and end with the `Cluster`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CORES = 2
_START_S = 20.0
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000
"""


def refusal() -> str | None:
    """Why this machine cannot run the cluster; None where it can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian, Ubuntu: apt install slurm-wlm munge)"
    return None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


class Cluster:
    """A context manager; ``run`` runs srun, sbatch and the like as its users do.

    Raises:
        RuntimeError: it does not come up; has the end of the daemons' logs.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hvdlite-slurm-"))
        self.environment = {"SLURM_CONF": str(self.directory / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` to its end; output captured."""
        environ = {**os.environ, **self.environment, **(env or {})}
        return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=timeout)

    def close(self) -> None:
        if self._daemons:
            self.run("scancel", "--full", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self) -> None:
        munge = self.directory / "munge"
        for directory in (munge, self.directory / "state", self.directory / "spool"):
            directory.mkdir()
        self.directory.chmod(0o755)  # munged refuses what others may write, and what its clients cannot reach
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        host = socket.gethostname().partition(".")[0]
        configuration = _CONFIGURATION.format(host=host, ports=_free_ports(2), cores=CORES, directory=self.directory)
        Path(self.environment["SLURM_CONF"]).write_text(configuration)
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self._wait("munged", lambda: (munge / "socket").exists())
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", host)
        self._wait("the node", lambda: "State=IDLE" in self.run("scontrol", "show", "node", host).stdout)

    def _daemon(self, program: str, *arguments: str) -> None:
        path = _find(program)
        assert path is not None
        log = (self.directory / f"{program}.out").open("wb")
        with closing(log):
            self._daemons.append(
                subprocess.Popen(
                    [path, *arguments],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not is_there():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                logs = sorted(self.directory.glob("*.out")) + sorted(self.directory.glob("*.log"))
                said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)
                raise RuntimeError(f"{what} did not come up within {_START_S:g} s:\n{said}")
            time.sleep(0.1)


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [open_socket.getsockname()[1] for open_socket in sockets]
    for open_socket in sockets:
        open_socket.close()
    return ports
