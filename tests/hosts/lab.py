"""Several emulated hosts on one Linux machine, for tests: no containers, no sshd.

A host is a network namespace (joined to the others by a bridge), a UTS namespace (own hostname), a mount namespace (own
/dev/shm, /sys and /etc/hosts) and an IPC namespace (without one MPICH's UCX moves data "between hosts" through System V
shared memory). A process per host, the holder, keeps the namespaces alive; it ends when its stdin closes, so a test run
that is killed leaves no host behind. The agent is a script that stands in for ssh when mpirun starts its daemons.

Host ``i`` is called ``node<i>`` and has the address 10.77.0.<i+1> on eth0.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

from hvdlite.cli.job import Host
from launching import Result, launch

NETWORK = "10.77.0."
DEAD_NETWORK = "10.78.0."
IPV6_NETWORK = "fd00:77::"
NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
_TOOLS = ("ip", "tc", "nsenter", "unshare", "setsid", "mount", "sysctl")
_PROBE = """
mount --make-rprivate /; mount -t tmpfs -o size=1m tmpfs /dev/shm; mount -t sysfs sysfs /sys; hostname probe
ip link set lo up; ip link add br0 type bridge; ip link add v0 type veth peer name v1; ip link set v0 master br0
tc qdisc add dev v1 root tbf rate 1gbit burst 128kb latency 50ms
"""


@cache
def refusal() -> str | None:
    """Why this machine cannot emulate hosts, or None where it can; tried, not guessed."""
    if os.geteuid() != 0:
        return "emulated hosts need root (network namespaces)"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need {', '.join(missing)} (Debian, Ubuntu: apt install iproute2 util-linux procps)"
    probe = subprocess.run(["unshare", *NAMESPACES, "sh", "-ec", _PROBE], capture_output=True, text=True)
    return f"emulated hosts are refused here: {probe.stderr.strip()}" if probe.returncode else None


def _call(*command: str, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{shlex.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}\n{stdin}"
        )
    return done.stdout


class _Holder:
    """A process that keeps namespaces alive, with ``script`` run in them once; raises RuntimeError where that fails."""

    def __init__(self, namespaces: Sequence[str], script: str) -> None:
        self.process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-ec", f"{script}\necho ready\nexec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the tests; the hosts end with them, in order
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"a host could not be made: {self.process.stderr.read().decode().strip()}")
        self.pid = self.process.pid
        self._network = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    def pids(self) -> list[int]:
        """Everything that runs in this network namespace, but for the holder."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                if (
                    entry.isdigit()
                    and int(entry) != self.pid
                    and os.stat(f"/proc/{entry}/ns/net").st_ino == self._network
                ):
                    found.append(int(entry))
            except OSError:  # it ended meanwhile
                continue
        return found

    def kill_processes(self) -> None:
        # Several passes: a process may fork between the listing and its end.
        for _ in range(50):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def close(self) -> None:
        self.kill_processes()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.kill()
        self.process.wait()


class Lab:
    """``n`` emulated hosts; a context manager that removes them, and every process in them, at its end.

    Args:
        n: number of hosts.
        rate: shapes every host's link in both directions, in tc's words ("1gbit"); empty means unshaped.
        delay_us: how long a packet takes from host to host, besides; it costs CPU (see wire.py).
        firewalls: hosts that drop connections to ports that programs choose (see wire.py).
        same_hostname: the hostname that every host reports, as cloned containers do; empty means node0, node1, ...
        dead_interface: gives every host a second interface that is up, resolves its peers, and drops what is sent.
        ipv6: gives every host an address of IPv6 as well, fd00:77::<i+1>.
        docker0: gives every host an interface docker0 with the same address, 172.17.0.1.

    Raises:
        RuntimeError: the machine refused; see `refusal`, which says so beforehand.
    """

    def __init__(
        self,
        n: int,
        *,
        rate: str = "",
        delay_us: float = 0,
        firewalls: Collection[int] = (),
        same_hostname: str = "",
        dead_interface: bool = False,
        ipv6: bool = False,
        docker0: bool = False,
    ) -> None:
        self.names = [f"node{i}" for i in range(n)]
        self.directory = Path(tempfile.mkdtemp(prefix="hvdlite-hosts-"))
        self.agent = self.directory / "agent"
        self._holders: list[_Holder] = []
        self._hub: _Holder | None = None
        self._wire: subprocess.Popen[bytes] | None = None
        try:
            self._hub = _Holder(["--net"], "ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
            if delay_us or firewalls:
                self._wire = self._start_wire(delay_us / 2, *firewalls)  # the time of each of the two links on the way
            hosts_file = self.directory / "hosts"
            lines = ["127.0.0.1 localhost", *(f"{self.address(i)} {name}" for i, name in enumerate(self.names))]
            hosts_file.write_text("\n".join(lines) + "\n")
            for i, name in enumerate(self.names):
                own = self.directory / f"hosts{i}"
                # A host can always resolve its own hostname, to its own address.
                own.write_text(
                    hosts_file.read_text() + (f"{self.address(i)} {same_hostname}\n" if same_hostname else "")
                )
                self._holders.append(_Holder(NAMESPACES, _host_script(own, same_hostname or name)))
                self._connect(i, rate=rate, dead_interface=dead_interface, ipv6=ipv6, docker0=docker0)
            self.agent.write_text(self._agent_script())
            self.agent.chmod(0o755)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.names)

    def address(self, host: int) -> str:
        return f"{NETWORK}{host + 1}"

    def enter(self, host: int) -> list[str]:
        """The words to put before a command so that it runs in ``host``, in the current directory."""
        return ["nsenter", "-t", str(self._holders[host].pid), *NAMESPACES, f"--wd={os.getcwd()}"]

    def run(self, host: int, *command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run ``command`` in ``host`` to its end; output captured."""
        return subprocess.run([*self.enter(host), *command], capture_output=True, text=True, timeout=timeout)

    def launch(
        self,
        script: str | Path,
        *args: str,
        ranks_per_host: Sequence[int],
        mpi: str = "current",
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        options: Sequence[str] = (),
    ) -> Result:
        """Run ``script`` with ``ranks_per_host[i]`` ranks on host ``i``, mpirun on host 0; see `launching.launch`.

        Hosts beyond those of ``ranks_per_host`` have none.
        """
        hosts = [Host(self.names[i], ranks) for i, ranks in enumerate(ranks_per_host)]
        return launch(
            sum(ranks_per_host),
            script,
            *args,
            mpi=mpi,
            env={**self.launch_environment, **(env or {})},
            timeout=timeout,
            options=options,
            hosts=hosts,
            enter=self.enter(0),
            shm_directories=[f"/proc/{holder.pid}/root/dev/shm" for holder in self._holders],
        )

    @property
    def launch_environment(self) -> dict[str, str]:
        """What makes each mpirun reach the hosts through the agent."""
        agent = str(self.agent)
        return {
            "PRTE_MCA_plm_ssh_agent": agent,  # Open MPI 5
            "OMPI_MCA_plm_rsh_agent": agent,  # Open MPI 4
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": agent,
        }

    def pids(self, host: int) -> list[int]:
        """Every process in ``host``."""
        return self._holders[host].pids()

    def crash(self, host: int) -> None:
        """Lose ``host`` as in a power cut: its network goes first, so that nobody hears of its processes' end."""
        (self.directory / f"lost{host}").touch()
        self.cut(host)
        self.kill_processes(host)

    def repair(self, host: int) -> None:
        """Undo `crash`: the host is there again, and nothing runs on it."""
        (self.directory / f"lost{host}").unlink()
        self.mend(host)

    def kill_processes(self, host: int) -> None:
        """Kill everything in ``host``, whose network stays."""
        self._holders[host].kill_processes()

    def cut(self, host: int) -> None:
        """Drop everything from and to ``host``; its link stays up."""
        assert self._hub is not None
        _call("nsenter", "-t", str(self._hub.pid), "--net", "ip", "link", "set", f"host{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        assert self._hub is not None
        _call("nsenter", "-t", str(self._hub.pid), "--net", "ip", "link", "set", f"host{host}", "master", "br0")

    def close(self) -> None:
        for holder in [*self._holders, *([self._hub] if self._hub else [])]:
            holder.close()
        if self._wire is not None:
            self._wire.communicate()
        self._holders.clear()
        self._hub = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _connect(self, host: int, *, rate: str, dead_interface: bool, ipv6: bool, docker0: bool) -> None:
        assert self._hub is not None
        pid = self._holders[host].pid
        if self._wire is None:
            outside = [f"link add host{host} type veth peer name eth0 netns {pid}"]
        else:
            outside = [f"link set near{host} name host{host}", f"link set far{host} netns {pid} name eth0"]
        outside += [f"link set host{host} master br0 up"]
        inside = [f"addr add {self.address(host)}/24 dev eth0", "link set eth0 up"]
        if dead_interface:
            # On no bridge, so packets end here; peers' addresses are known, so connect() waits instead of failing.
            outside += [f"link add dead{host} type veth peer name eth1 netns {pid}", f"link set dead{host} up"]
            inside += [f"addr add {DEAD_NETWORK}{host + 1}/24 dev eth1", "link set eth1 up"]
            inside += [
                f"neigh replace {DEAD_NETWORK}{peer + 1} lladdr 02:00:00:00:78:{peer + 1:02x} dev eth1 nud permanent"
                for peer in range(len(self))
                if peer != host
            ]
        if ipv6:
            inside += [f"addr add {IPV6_NETWORK}{host + 1}/64 dev eth0 nodad"]
        if docker0:
            inside += ["link add docker0 type veth peer name vdocker", "link set vdocker up"]
            inside += ["addr add 172.17.0.1/16 dev docker0", "link set docker0 up"]
        hub_net = ("nsenter", "-t", str(self._hub.pid), "--net")
        host_net = ("nsenter", "-t", str(pid), "--net")
        _call(*hub_net, "ip", "-batch", "-", stdin="\n".join(outside))
        _call(*host_net, "ip", "-batch", "-", stdin="\n".join(inside))
        # bbr, the default on some machines, caps an unshaped veth at 16 Gbit/s.
        _call(*host_net, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
        if rate:
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
            _call(*hub_net, "tc", "qdisc", "add", "dev", f"host{host}", *shape)
            _call(*host_net, "tc", "qdisc", "add", "dev", "eth0", *shape)

    def _start_wire(self, *words: float) -> subprocess.Popen[bytes]:
        assert self._hub is not None
        script = Path(__file__).with_name("wire.py")
        wire = subprocess.Popen(
            [
                *("nsenter", "-t", str(self._hub.pid), "--net"),
                *(sys.executable, str(script), str(len(self)), *map(str, words)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert wire.stdout is not None
        if wire.stdout.readline() != b"ready\n":
            raise RuntimeError("links that take time could not be made; they need /dev/net/tun")
        return wire

    def _agent_script(self) -> str:
        """What mpirun runs instead of ssh: ``agent [options] host command...``, with ssh's clean environment."""
        cases = "\n".join(
            f"  {name}|{self.address(i)}) host={i} pid={self._holders[i].pid};;" for i, name in enumerate(self.names)
        )
        return f"""#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -[lpioFe]) shift 2;; -*) shift;; *) break;; esac; done
name=${{1##*@}}; shift
case $name in
{cases}
  *) echo "ssh: Could not resolve hostname $name: Name or service not known" >&2; exit 255;;
esac
lost={shlex.quote(str(self.directory))}/lost$host
[ -e $lost ] && {{ echo "ssh: connect to host $name port 22: No route to host" >&2; exit 255; }}
# A session of its own: signals to mpirun's process group do not cross to another host, as with ssh.
setsid nsenter -t $pid {" ".join(NAMESPACES)} /usr/bin/env -i HOME="$HOME" USER=root LOGNAME=root SHELL=/bin/bash \\
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /bin/bash -c "cd; $*" <&0 &
{{ wait $!; }} 2>/dev/null; status=$?
[ -e $lost ] && exec sleep infinity  # the host is gone, not only its command: ssh would not hear of it either
exit $status
"""


def _host_script(hosts_file: Path, hostname: str) -> str:
    # Without its own /sys a host sees the machine's interfaces there, and UCX looks there.
    return f"""
mount --make-rprivate /
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount -t sysfs sysfs /sys
mount --bind {shlex.quote(str(hosts_file))} /etc/hosts
hostname {shlex.quote(hostname)}
ip link set lo up
"""
