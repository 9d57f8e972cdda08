"""Which interfaces a specification selects, and the variables that make MPI libraries use them."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hvdlite import mpi
from hvdlite.errors import ConfigError
from hvdlite.links import interfaces as module
from hvdlite.links.interfaces import Interface, interfaces, is_own, mpi_environment, select

LO = Interface("lo", "127.0.0.1", up=True, loopback=True)
ETH0 = Interface("eth0", "10.77.0.1", up=True, loopback=False)
ETH1 = Interface("eth1", "10.78.0.1", up=True, loopback=False)
ETH10 = Interface("eth10", "10.79.0.1", up=True, loopback=False)
DOWN = Interface("eth2", "10.80.0.1", up=False, loopback=False)
IB0 = Interface("ib0", "10.81.0.1", up=True, loopback=False)
DOCKER = Interface("docker0", "172.17.0.1", up=True, loopback=False)
ALL = [LO, ETH0, ETH1, ETH10, DOWN, IB0, DOCKER]


@pytest.fixture(autouse=True)
def no_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(module, "_INFINIBAND", tmp_path / "infiniband")
    return tmp_path / "infiniband"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", [ETH0, ETH1, ETH10, IB0]),
        ("eth", [ETH0, ETH1, ETH10]),
        ("eth1", [ETH1, ETH10]),
        ("=eth1", [ETH1]),
        ("=eth1,ib0", [ETH1, IB0]),
        ("ib,eth0", [ETH0, IB0]),
        ("ib, eth0", [ETH0, IB0]),
        ("^eth", [IB0]),
        ("^eth1,ib", [ETH0]),
        ("^=eth1", [ETH0, ETH10, IB0]),
        ("docker", [DOCKER]),
        ("lo", [LO]),
        ("^eth,ib", [LO]),
    ],
)
def test_selects(spec: str, expected: list[Interface]) -> None:
    assert select(spec, ALL) == expected


def test_which_addresses_are_own() -> None:
    assert is_own("127.0.0.1") and is_own("127.0.1.1")
    assert all(is_own(interface.address) for interface in interfaces() if interface.up)
    assert not any(map(is_own, ["192.0.2.1", "2001:db8::1", "localhost", "", "127.0.0"]))


@pytest.mark.parametrize("spec", ["wlan", "=eth", "=eth2", "eth2", "^", "=", "^="])
def test_error_names_what_exists(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"eth0 \(10\.77\.0\.1\), .*eth2 \(10\.80\.0\.1, down\)"):
        select(spec, ALL)


def test_excluding_everything_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no interface that is up matches"):
        select("^lo,eth", [LO, ETH0])


def test_only_loopback() -> None:
    assert select("", [LO]) == [LO]
    assert select("", [LO, DOCKER]) == [LO]
    assert mpi_environment("", {}, [LO]) == {}


def test_no_network_at_all() -> None:
    assert select("", []) == []
    assert mpi_environment("", {}, []) == {}


def test_environment_of_a_choice() -> None:
    assert mpi_environment("=eth0,eth1", {}, ALL) == {
        "OMPI_MCA_btl_tcp_if_include": "eth0,eth1",
        "UCX_NET_DEVICES": "eth0,eth1",
        "FI_TCP_IFACE": "eth0",
        "FI_SOCKETS_IFACE": "eth0",
    }


def test_environment_without_a_choice_keeps_bridges_out() -> None:
    assert mpi_environment("", {}, [LO, ETH0, DOCKER])["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    assert mpi_environment("", {}, [LO, ETH0, ETH1]) == {}


@pytest.mark.parametrize("name", ["OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"])
def test_users_open_mpi_setting_wins(name: str) -> None:
    added = mpi_environment("eth0", {name: "eth1"}, ALL)
    assert not [variable for variable in added if variable.startswith("OMPI_")]
    assert added["UCX_NET_DEVICES"] == "eth0"


@pytest.mark.parametrize("name", ["UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"])
def test_users_setting_wins(name: str) -> None:
    assert set(mpi_environment("eth0", {}, ALL)) - set(mpi_environment("eth0", {name: "x"}, ALL)) == {name}


def test_infiniband_stays_in_use(no_infiniband: Path) -> None:
    for name, state in [("mlx5_0/ports/1", "4: ACTIVE\n"), ("mlx5_1/ports/1", "1: DOWN\n")]:
        (no_infiniband / name).mkdir(parents=True)
        (no_infiniband / name / "state").write_text(state)
    added = mpi_environment("eth0", {}, ALL)
    assert added["UCX_NET_DEVICES"] == "mlx5_0:1,eth0"
    assert added["OMPI_MCA_btl_tcp_if_include"] == "eth0"


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ([LO, IB0, DOCKER], {"OMPI_MCA_btl_tcp_if_include": "ib0", "UCX_NET_DEVICES": "x", "FI_TCP_IFACE": "ib0"}),
        ([LO, IB0], {"UCX_NET_DEVICES": "x"}),
    ],
    ids=["another interface", "nothing to keep out"],
)
def test_a_rank_chooses_by_the_names_of_its_host(
    here: list[Interface], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OMPI_MCA_btl_tcp_if_include", "UCX_NET_DEVICES", "FI_TCP_IFACE")
    chosen_elsewhere = dict.fromkeys(names, "eth0")
    told = {"HVDLITE_MPI_INTERFACES": " ".join(f"{name}={value}" for name, value in chosen_elsewhere.items())}
    # An option of mpirun has replaced one of them since.
    monkeypatch.setattr(os, "environ", {**chosen_elsewhere, **told, "UCX_NET_DEVICES": "x"})
    monkeypatch.setattr(module, "interfaces", lambda: here)
    mpi._choose_interfaces("")
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def test_this_machine() -> None:
    found = {interface.name: interface for interface in interfaces()}
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    assert replace(found["lo"], more=()) == LO
    for interface in found.values():
        if interface.up:  # an address that is really here can be bound
            with socket.socket() as server:
                server.bind((interface.address, 0))


def test_ipv6_addresses_that_lead_somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of a link alone, which need the interface beside them, nor those that are not this host's yet."""
    table = tmp_path / "if_inet6"
    monkeypatch.setattr(module, "_IPV6", table)
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
        "20010db8000000000000000000000008 02 40 00 40     eth0\n"
        "20010db8000000000000000000000009 02 40 00 08     eth0\n"
    )
    assert module._ipv6_addresses() == {"lo": ["::1"], "eth0": ["2001:db8::7"]}
    assert {i.name: i.addresses for i in interfaces()}["lo"] == ("127.0.0.1", "::1")
    table.unlink()  # a kernel without IPv6
    assert module._ipv6_addresses() == {}
