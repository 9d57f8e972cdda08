"""Whether full frames reach other hosts: where they do not, large messages hang, and this end may see nothing of it.

Nobody has to listen there: a datagram to a port that nobody has comes back as a refusal, a lost one does not. IPv4.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE, _IP_MTU = (
    10,
    3,
    14,
)  # linux/in.h; PROBE: never split, whatever the kernel has heard
_HEADERS_BYTES = 28  # of IP and UDP
_PORT = 9  # discard, which hardly anybody serves
_SMALL_BYTES = 64
_ANSWER_S = 1.0
_TRIES = 2


def complaints(hosts: Sequence[str]) -> list[str]:
    """Of each host to which small frames get through and full ones do not, what to check; takes 4 s at most."""
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
        return [text for text in pool.map(_complaint, hosts) if text]


def full_ones_arrive(host: str) -> bool:
    """Whether the largest frames that this end sends get to ``host``, and their answers back; takes 2 s at most."""
    with suppress(OSError), _probe_of(host) as probe:
        return _arrives(probe, probe.getsockopt(socket.IPPROTO_IP, _IP_MTU))
    return False


def _probe_of(host: str) -> socket.socket:
    """Raises OSError."""
    with ExitStack() as on_failure:
        probe = on_failure.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        probe.settimeout(_ANSWER_S)
        probe.connect((host, _PORT))
        on_failure.pop_all()
        return probe


def _complaint(host: str) -> str:
    try:
        with _probe_of(host) as probe:
            mtu = probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
            if not _arrives(probe, _SMALL_BYTES) or _arrives(probe, mtu):
                return ""
    except OSError:  # nothing can be said
        return ""
    return (
        f"{host}: frames of {_SMALL_BYTES} bytes arrive, and full ones of {mtu}, as this host sends them, are lost: "
        f"check that the MTU is the same on all hosts and on the way (ping -M do -s {mtu - _HEADERS_BYTES} {host})"
    )


def _arrives(probe: socket.socket, frame_bytes: int) -> bool:
    """Whether a frame gets to the other host, and its answer back."""
    for _ in range(_TRIES):
        try:
            probe.send(bytes(frame_bytes - _HEADERS_BYTES))
            probe.recv(1)
            return True  # somebody has the port
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            continue
    return False
