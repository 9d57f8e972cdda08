"""Where processes meet that mpirun or hvdliterun has started, and that torch was told nothing of."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from hvdlite import default_runtime, environment, launched, processes
from hvdlite.config import Config
from hvdlite.errors import StartupError
from hvdlite.launched import Meeting
from hvdlite.links.interfaces import interfaces, select
from hvdlite.links.proof import new_key
from hvdlite.start.rendezvous import GROUP_LIMIT, Wait

_TRY_S = 2.0  # an address that leads nowhere
_FOREVER_S = 1e9  # clocks cannot count much longer waits


def meets_without_variables(url: str) -> bool:
    """Whether ``env://`` finds no address, in a process of a launcher that has another meeting place.

    Where the program gives other numbers than the launcher, it means other ranks. Accelerate gives the launcher's.
    """
    process = launched.this_process()
    if process is None or process.launcher.meeting not in (Meeting.MPI, Meeting.POINT):
        return False
    numbers = {"rank": str(process.rank), "world_size": str(process.size)}
    given = parse_qs(urlparse(url).query)
    agrees = all(given.get(name, [number])[0] == number for name, number in numbers.items())
    return agrees and "MASTER_ADDR" not in environment.variables()


def stores(timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """What a handler of torch's rendezvous yields: store, rank and size. The store lives in the first process.

    Raises:
        StartupError: the processes do not find one another; says what to do.
    """
    default_runtime.accompany(_WITH_PROCESS)
    with default_runtime.peers().announced(None):
        found = _found(timeout)
    yield found
    raise RuntimeError("ranks of mpirun and hvdliterun meet once; start the job anew")


def _found(timeout: timedelta) -> tuple[Store, int, int]:
    config = Config.from_env()
    wait = Wait(min(timeout.total_seconds(), _FOREVER_S), "init_process_group()", GROUP_LIMIT)
    with default_runtime.peers().of(None, config, wait) as everybody:
        if everybody is None or everybody.size == 1:
            _tell_libraries(0, [machine()])
            return HashStore(), 0, 1
        ranks = everybody.subset(range(everybody.size))  # the time for a start begins now
        timeout = max(timeout, timedelta(seconds=1))  # torch 2.4 counts whole seconds
        told = ranks.allgather((machine(), new_key() if ranks.rank == 0 else b""))
        default_runtime.peers().store_key = told[0][1]
        if ranks.rank == 0:
            is_for_here = len({where for where, _ in told}) == 1
            addresses = _loopback() if is_for_here else []
            addresses = addresses or [interface.address for interface in select(config.network_interfaces)]
            listener = listen(addresses)
            port = listener.getsockname()[1]
            store = TCPStore(
                addresses[0] if len(addresses) == 1 else "0.0.0.0",
                port,
                ranks.size,
                True,
                timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=torch.__version__ >= "2.8",  # an older one opens no socket by its descriptor
            )
            ranks.allgather(((socket.gethostname(), addresses), port))
        else:
            (hostname, addresses), port = ranks.allgather(None)[0]
            here = ["127.0.0.1"] if len(addresses) > 1 and hostname == socket.gethostname() else []
            host = _first_that_answers([*here, *addresses], port, hostname)
            store = TCPStore(host, port, ranks.size, False, timeout, wait_for_workers=False)
        ranks.close()
        _tell_libraries(ranks.rank, [where for where, _ in told])
        return store, ranks.rank, ranks.size


def _tell_libraries(rank: int, machines: Sequence[object]) -> None:
    """Set what torchrun would have set, but for the address: Accelerate and Lightning look at nothing else.

    Not before the program asks for a process group: they would begin one for programs that use ``hvd``. Nor LOCAL_RANK
    where ranks share a GPU: torch takes it for the number of a GPU that a rank has for itself.
    """
    here = [number for number, where in enumerate(machines) if where == machines[rank]]
    said = {"RANK": rank, "WORLD_SIZE": len(machines), "LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here)}
    if 0 < torch.cuda.device_count() < len(here):
        del said["LOCAL_RANK"]
    environment.add({name: str(number) for name, number in said.items()})


def machine() -> tuple[str, str, int]:
    """Ranks for which it differs share no memory: abstract sockets, by which ranks pass it, belong to a network
    namespace of one boot of one kernel."""
    return socket.gethostname(), processes.machine(), os.stat("/proc/self/ns/net").st_ino


def listen(addresses: Sequence[str]) -> socket.socket:
    """A socket for a store at the one of ``addresses``; if there are more, at all that this host has.

    A store has one socket, which is at one address or at all, and only ranks that try know which leads to them. At all
    it is of IPv4, if ``addresses`` are: torch would take one of IPv6 for both, and looks up the name of each address
    that connects, twice. In the form that IPv6 has for them, addresses of this host are in no /etc/hosts, so it asks a
    name server, which may not answer.
    """
    has_ipv6 = any(":" in address for address in addresses)
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    if len(addresses) == 1:
        return socket.create_server((addresses[0], 0), family=family, backlog=4096)
    return socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=has_ipv6)


class _WithProcess:
    """A default group over another backend, as a `hvdlite.process.Companion`: one over hvdlite is one itself.

    Where ranks have met by MPI, a process waits for the others before it ends, and those may wait for it over Gloo.
    """

    failure = None

    def fail(self, error: BaseException) -> None:
        """The others learn of it by the end of the process."""

    def close(self) -> None:
        if dist.is_initialized() and dist.get_backend() != "hvdlite":
            dist.destroy_process_group()

    def abandon_in_child(self) -> None:
        """A forked child does not come to `close`."""


_WITH_PROCESS = _WithProcess()


def _loopback() -> list[str]:
    return [interface.address for interface in interfaces() if interface.loopback and interface.up][:1]


def _first_that_answers(hosts: list[str], port: int, hostname: str) -> str:
    for host in hosts:
        try:
            socket.create_connection((host, port), _TRY_S).close()
        except OSError:
            continue
        return host
    raise StartupError(
        f"rank 0, on {hostname}, cannot be reached at port {port} of any of its addresses ({', '.join(hosts)}). Name "
        "an interface that connects the hosts in HVDLITE_NETWORK_INTERFACES, and check firewalls between them."
    )
