"""Links that take time, for kernels without netem: each is two tap devices; what enters one leaves the other later.

    python wire.py LINKS DELAY_US [LINK...]     # makes near0 and far0, ...; says "ready"; ends when stdin closes

The links that are named have a firewall at their far ends, as a host that lets in ssh alone: what begins a TCP
connection to a port that programs choose is lost there without a word. What follows passes, and answers do.

A process of its own, in the namespace where the devices shall begin.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x1 | 0x2 | 0x4  # checksums and TCP segments of 64 KiB, which pass as they are
_LARGEST_FRAME = 1 << 17
_BEFORE_IP = 10 + 14  # struct virtio_net_hdr, and Ethernet's header, which ends with what follows
_IPV4, _TCP = b"\x08\x00", 6
_SYN, _ACK = 0x02, 0x10
_FIRST_CHOSEN_PORT = 32768  # net.ipv4.ip_local_port_range


def open_tap(name: str) -> int:
    """The file descriptor of a new tap device."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


def is_call(frame: bytes) -> bool:
    """Whether ``frame`` begins a TCP connection to a port that programs choose."""
    ip = frame[_BEFORE_IP:]
    if frame[_BEFORE_IP - 2 : _BEFORE_IP] != _IPV4 or ip[9] != _TCP:
        return False
    tcp = ip[4 * (ip[0] & 0xF) :]
    return tcp[13] & (_SYN | _ACK) == _SYN and int.from_bytes(tcp[2:4], "big") >= _FIRST_CHOSEN_PORT


def main() -> None:
    links, delay_s = int(sys.argv[1]), float(sys.argv[2]) * 1e-6
    closed = {int(word) for word in sys.argv[3:]}
    guarded: set[int] = set()  # whose frames come to a firewall
    across: dict[int, int] = {}
    for link in range(links):
        near, far = open_tap(f"near{link}"), open_tap(f"far{link}")
        across[near], across[far] = far, near
        guarded |= {near} if link in closed else set()
    print("ready", flush=True)
    stdin = sys.stdin.fileno()
    on_the_way: deque[tuple[float, int, bytes]] = deque()  # when, where to, what: the first is the next
    while True:
        wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        ready, _, _ = select.select([*across, stdin], [], [], wait_s)
        if stdin in ready:
            return
        arrival = time.monotonic() + delay_s
        for fd in ready:
            try:
                frame = os.read(fd, _LARGEST_FRAME)
            except OSError:  # its host is gone
                del across[fd]
                continue
            if fd not in guarded or not is_call(frame):
                on_the_way.append((arrival, across[fd], frame))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, fd, frame = on_the_way.popleft()
            with suppress(OSError):  # the device is down: so is the link
                os.write(fd, frame)


if __name__ == "__main__":
    main()
