"""What is seen of TCP connections in /proc, and what is said of those that are stuck."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from hvdlite.links import connections
from hvdlite.links.connections import Connection, complaints, of_processes


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_of_this_process_is_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    port = server.getsockname()[1]
    with server, socket.create_connection((host, port)), server.accept()[0]:
        (found,) = [link for link in of_processes([os.getpid()]) if (link.peer, link.port) == (host, port)]
        assert found.is_open and not found.complaint()
        assert not [link for link in of_processes([1]) if link.port == port]
    assert not [link for link in of_processes([os.getpid()]) if link.port == port and link.is_open]


def test_each_evidence_has_a_cure_of_its_own() -> None:
    peer = ("10.0.0.2", 4711)
    fine = [Connection(*peer, 1, 0, 0), Connection(*peer, 1, 9000, 1), Connection(*peer, 2, 1, 0)]
    assert complaints(fine) == []
    (firewall,) = complaints([Connection(*peer, 2, 1, 3)])
    assert firewall.startswith("10.0.0.2 port 4711 does not answer: ") and "firewall" in firewall
    (mtu,) = complaints([Connection(*peer, 1, 9000, 4)] * 2)
    assert "9000 bytes sent to it are lost" in mtu and "MTU" in mtu and "firewall" not in mtu
    (lost,) = complaints([Connection(*peer, 1, 4, 4)])
    assert "does no longer" in lost and "MTU" not in lost


def test_it_runs_as_a_program_without_anything_installed() -> None:
    command = [sys.executable, "-I", "-S", connections.__file__, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("hvdlite: ")
