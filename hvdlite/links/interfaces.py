"""The machine's network interfaces, and how to make an MPI library use the right ones.

A second interface that is up but leads nowhere stops an MPI job for minutes, or for good, and so does a container
bridge that has the same address on every host; so interfaces are chosen before MPI_Init, through the library's own
variables.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdlite.errors import ConfigError

# Bridges that container and virtual machine software makes: the same address on every host, and no way out.
VIRTUAL_BRIDGES = ("docker", "br-", "virbr", "podman", "cni-podman", "lxcbr", "lxdbr")

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # linux/if.h
_INFINIBAND = Path("/sys/class/infiniband")
_IPV6 = Path("/proc/net/if_inet6")
_GLOBAL, _HOST = 0x00, 0x10  # include/net/ipv6.h: scopes of addresses that need no interface beside them
_TENTATIVE, _FAILED = 0x40, 0x08  # linux/if_addr.h


@dataclass(frozen=True)
class Interface:
    """A network interface that has addresses.

    Attributes:
        address: the IPv4 one; the first IPv6 one where it has none.
        more: IPv6 addresses beside that.
    """

    name: str
    address: str
    up: bool
    loopback: bool
    more: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self.address, *self.more)

    def __str__(self) -> str:
        return f"{self.name} ({self.address}{'' if self.up else ', down'})"


def interfaces() -> list[Interface]:
    """The interfaces that have an IPv4 address, or an IPv6 one that leads to other hosts, in the kernel's order."""
    found = []
    ipv6 = _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:

        def ask(request: int, name: str) -> bytes:
            # struct ifreq: the name in 16 bytes, then a union of 24; the answer comes back in the union.
            return fcntl.ioctl(query, request, struct.pack("16s24x", name.encode()))[16:]

        for _, name in socket.if_nameindex():
            addresses = list(ipv6.get(name, ()))
            with suppress(OSError):  # no IPv4 address
                # struct sockaddr_in: family and port in 4 bytes, then the address in 4.
                addresses.insert(0, socket.inet_ntoa(ask(_SIOCGIFADDR, name)[4:8]))
            try:
                flags = struct.unpack("h", ask(_SIOCGIFFLAGS, name)[:2])[0]
            except OSError:  # no interface any more
                continue
            if addresses:
                up, loopback = bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK)
                found.append(Interface(name, addresses[0], up, loopback, tuple(addresses[1:])))
    return found


def is_own(address: str) -> bool:
    """Whether this machine has the address, of IPv4 or IPv6, on whichever interface; names are none."""
    with suppress(ValueError, OSError):
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def _ipv6_addresses() -> dict[str, list[str]]:
    """The IPv6 addresses of each interface that can be used as they are: not those of one link."""
    found: dict[str, list[str]] = {}
    try:
        lines = _IPV6.read_text().splitlines()
    except OSError:  # the kernel has no IPv6
        return {}
    for digits, _, _, scope, flags, name in map(str.split, lines):
        if int(scope, 16) in (_GLOBAL, _HOST) and not int(flags, 16) & (_TENTATIVE | _FAILED):
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def select(spec: str, available: Sequence[Interface] | None = None) -> list[Interface]:
    """The interfaces that ``spec`` chooses among those that are up.

    Args:
        spec: as NCCL_SOCKET_IFNAME: names separated by commas, each a prefix ("eth" matches eth0 and eth1). A leading
            ``=`` means exact names, a leading ``^`` excludes what matches, ``^=`` excludes exact names. Bridges of
            container software and loopback are chosen only if asked for by name, or, loopback, if it is all there is.
            Empty means everything else.
        available: what to choose from; the machine's by default.

    Raises:
        ConfigError: nothing matches; names the interfaces that exist.
    """
    existing = list(interfaces() if available is None else available)
    exclude = spec.startswith("^")
    exact = spec.removeprefix("^").startswith("=")
    names = [name.strip() for name in spec.removeprefix("^").removeprefix("=").split(",") if name.strip()]
    if spec.strip() and not names:
        raise ConfigError(f"network interfaces {spec!r}: no name given; {_listing(existing)}")
    exclude = exclude or not names

    def matches(interface: Interface) -> bool:
        return any(interface.name == name if exact else interface.name.startswith(name) for name in names)

    up = [interface for interface in existing if interface.up]
    if not exclude:
        chosen = [interface for interface in up if matches(interface)]
    else:
        rest = [i for i in up if not matches(i) and not i.name.startswith(VIRTUAL_BRIDGES)]
        chosen = [interface for interface in rest if not interface.loopback] or rest
    if not chosen and spec.strip():
        raise ConfigError(f"network interfaces {spec!r}: no interface that is up matches; {_listing(existing)}")
    return chosen or up


def mpi_environment(
    spec: str, environ: Mapping[str, str], available: Sequence[Interface] | None = None
) -> dict[str, str]:
    """The variables that make Open MPI and MPICH use the interfaces of ``spec``; to be set before MPI_Init.

    Variables that ``environ`` has already are the user's choice and are left out. With an empty ``spec`` there are
    variables only where a bridge of container software must be kept out.

    Raises:
        ConfigError: see `select`.
    """
    existing = list(interfaces() if available is None else available)
    chosen = select(spec, existing)
    unwanted = [
        interface for interface in existing if interface.up and not interface.loopback and interface not in chosen
    ]
    if not chosen or (not spec.strip() and not unwanted):
        return {}
    names = [interface.name for interface in chosen]
    variables = {}
    # Open MPI refuses to have both of these set, so either one is the user's choice.
    if not {"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"} & environ.keys():
        variables["OMPI_MCA_btl_tcp_if_include"] = ",".join(names)
    if "UCX_NET_DEVICES" not in environ:
        # UCX uses nothing that this list does not name, so InfiniBand ports stay in the list.
        variables["UCX_NET_DEVICES"] = ",".join([*_infiniband_ports(), *names])
    # libfabric's TCP providers, of which MPICH takes either, know one interface each.
    for name in ("FI_TCP_IFACE", "FI_SOCKETS_IFACE"):
        if name not in environ:
            variables[name] = names[0]
    return variables


def _infiniband_ports() -> list[str]:
    """Active ports in UCX's words, as "mlx5_0:1"."""
    ports = []
    for state in sorted(_INFINIBAND.glob("*/ports/*/state")):
        if "ACTIVE" in state.read_text():
            ports.append(f"{state.parts[-4]}:{state.parts[-2]}")
    return ports


def _listing(existing: Sequence[Interface]) -> str:
    return f"{socket.gethostname()} has {', '.join(map(str, existing)) or 'no interface with an address'}"
