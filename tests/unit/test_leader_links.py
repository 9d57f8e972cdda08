"""TCP between node leaders: who proves itself gets a link, whoever else turns up on the way does not."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from hvdlite.errors import StartupError
from hvdlite.links import reception
from hvdlite.links.dial import Address
from hvdlite.links.interfaces import Interface
from hvdlite.links.leader_links import _CLAIM as CLAIM, Listener, _secret, connect, connect_leaders
from hvdlite.links.proof import Caller, Secret, new_key, prove
from hvdlite.links.reception import Hearing
from hvdlite.topology import Topology
from thread_comm import on_ranks

HERE = "127.0.0.1"
LO = Interface("lo", HERE, up=True, loopback=True)
KEY = new_key()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def parent(children: tuple[int, ...] = (1,), interfaces: Sequence[Interface] = (LO,)) -> Iterator[Listener]:
    with closing(Listener(interfaces, KEY, 0, children)) as listener:
        yield listener


def links_of(listener: Listener) -> dict[int, socket.socket]:
    return listener.links(soon())


def as_child(secret: Secret, address: Address, child: int = 1, called: int = 0) -> socket.socket:
    """A blocking connection that has proven itself as that child, if it can."""
    link = socket.create_connection(address, timeout=5)
    try:
        prove(secret, link, CLAIM.pack(child, called))
    except BaseException:
        link.close()
        raise
    return link


def is_hung_up(link: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return link.recv(64) == b""
    return True


def check_link(one: socket.socket, other: socket.socket) -> None:
    """Both ends are of one connection, and nothing of the handshake is left in it."""
    one.settimeout(5.0)
    other.settimeout(5.0)
    one.sendall(b"down")
    other.sendall(b"up")
    assert other.recv(64) == b"down"
    assert one.recv(64) == b"up"


@contextmanager
def stranger() -> Iterator[int]:
    """A server that takes connections and never says anything, as another program on that port would."""
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()[1]


def refused_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


def test_every_child_gets_its_own_link() -> None:
    with parent((1, 2, 3)) as listener:
        ends = {child: connect(listener.addresses, KEY, child, 0, soon()) for child in (3, 1, 2)}
        links = links_of(listener)
        assert sorted(links) == [1, 2, 3]
        for child, end in ends.items():
            with end, links[child]:
                check_link(links[child], end)


def test_a_child_alone_is_a_link_as_well_over_ipv6() -> None:
    if not socket.has_ipv6 or not interfaces_with("::1"):
        pytest.skip("no IPv6 here")
    with parent(interfaces=[Interface("lo", "::1", up=True, loopback=True)]) as listener:
        assert listener.addresses[0][0] == "::1"
        with connect(listener.addresses, KEY, 1, 0, soon()) as end, links_of(listener)[1] as link:
            assert end.family == socket.AF_INET6
            check_link(link, end)


def interfaces_with(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_it_listens_at_chosen_addresses_only() -> None:
    """127.0.0.2 is this host as well, and would be reached if it listened everywhere."""
    with parent() as listener:
        assert [host for host, _ in listener.addresses] == [HERE]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", listener.addresses[0][1]), timeout=5)


def test_no_address_to_listen_at() -> None:
    gone = Interface("eth7", "192.0.2.1", up=True, loopback=False)
    with pytest.raises(StartupError, match=r"192\.0\.2\.1.*HVDLITE_NETWORK_INTERFACES"):
        Listener([gone], KEY, 0, [1])


def test_addresses_that_lead_nowhere_are_passed_over() -> None:
    """192.0.2.0/24 is for documentation (RFC 5737): packets to it are dropped or refused, wherever this runs."""
    with stranger() as strange_port, parent() as listener:
        addresses = [("192.0.2.1", 9), (HERE, refused_port()), (HERE, strange_port), *listener.addresses]
        with connect(addresses, KEY, 1, 0, soon()) as end, links_of(listener)[1] as link:
            check_link(link, end)


WRONG_KEY = Secret(bytes(32), _secret(KEY).purpose, CLAIM.size)
WRONG_PURPOSE = Secret(KEY, b"call", CLAIM.size)


@pytest.mark.parametrize(
    ("secret", "child", "called", "is_told"),
    [(WRONG_KEY, 1, 0, True), (WRONG_PURPOSE, 1, 0, True), (_secret(KEY), 1, 7, False), (_secret(KEY), 9, 0, False)],
    ids=["another job", "another purpose", "another parent", "not a child"],
)
def test_who_cannot_prove_itself_is_sent_away(secret: Secret, child: int, called: int, is_told: bool) -> None:
    with parent() as listener:
        if is_told:
            with pytest.raises(ConnectionError, match="does not know the job's key"):
                as_child(secret, listener.addresses[0], child, called)
        else:
            with as_child(secret, listener.addresses[0], child, called) as wrong:
                assert is_hung_up(wrong)
        with connect(listener.addresses, KEY, 1, 0, soon()) as end, links_of(listener)[1] as link:
            check_link(link, end)


def test_a_stranger_learns_nothing_that_it_can_use() -> None:
    """What a parent says to a wrong proof, and a recorded conversation of a true child, are both worthless."""
    with parent((1, 2)) as listener:
        address = listener.addresses[0]
        with socket.create_connection(address, timeout=5) as link:
            caller = Caller(_secret(KEY), link, CLAIM.pack(1, 0))
            link.sendall(caller.hello)
            challenge = link.recv(Caller.answer_bytes, socket.MSG_WAITALL)
            assert KEY not in challenge
            recorded = caller.hello, caller.answer(challenge)
        with socket.create_connection(address, timeout=5) as link:
            link.sendall(b"".join(recorded))
            assert len(link.recv(Caller.answer_bytes, socket.MSG_WAITALL)) == Caller.answer_bytes
            assert is_hung_up(link)
        with socket.create_connection(address, timeout=5) as link:  # the parent's own proof, sent back
            link.sendall(caller.hello)
            link.sendall(link.recv(Caller.answer_bytes, socket.MSG_WAITALL)[-32:])
            assert is_hung_up(link)
        assert listener.links(soon(0.1)) == {}


def test_a_child_shows_nothing_to_a_stranger_at_its_parents_address() -> None:
    """Neither the key, nor a proof; and one who passes all on to the parent is found out by the address."""
    said = bytearray()
    with parent() as listener, socket.create_server((HERE, 0)) as between:

        def pass_on() -> None:
            link, _ = between.accept()
            with link, socket.create_connection(listener.addresses[0], timeout=5) as onward:
                link.settimeout(5)
                said.extend(link.recv(24))
                onward.sendall(said)
                link.sendall(onward.recv(Caller.answer_bytes, socket.MSG_WAITALL))
                with suppress(ConnectionResetError):
                    said.extend(link.recv(64))

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(StartupError):
            connect([between.getsockname()], KEY, 1, 0, soon(0.5))
        thread.join()
        assert len(said) == 24 and KEY not in said
        assert listener.links(soon(0.1)) == {}


def test_strangers_who_come_in_numbers_and_say_nothing_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "MOST_UNPROVEN", 20)
    before = open_files()
    with parent() as listener, ExitStack() as strangers:
        links = [strangers.enter_context(socket.create_connection(listener.addresses[0])) for _ in range(60)]
        with connect(listener.addresses, KEY, 1, 0, soon()) as end, links_of(listener)[1] as link:
            check_link(link, end)
        assert all(map(is_hung_up, links))
    assert open_files() == before


def test_strangers_of_one_host_do_not_drive_out_who_comes_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the answer to a child and its proof, which may take a while on a busy machine."""
    monkeypatch.setattr(reception, "MOST_UNPROVEN", 20)
    with parent() as listener, ExitStack() as strangers, socket.create_connection(listener.addresses[0]) as end:
        end.settimeout(20)
        child = Caller(_secret(KEY), end, CLAIM.pack(1, 0))
        end.sendall(child.hello)
        challenge = end.recv(Caller.answer_bytes, socket.MSG_WAITALL)
        came = [
            strangers.enter_context(
                socket.create_connection(listener.addresses[0], timeout=20, source_address=("127.0.0.2", 0))
            )
            for _ in range(60)
        ]
        assert all(map(is_hung_up, came[:30]))
        end.sendall(child.answer(challenge))
        with links_of(listener)[1] as link:
            check_link(link, end)


def test_a_proof_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "PATIENCE_S", 0.2)
    with parent() as listener, socket.create_connection(listener.addresses[0], timeout=5) as silent:
        assert is_hung_up(silent)


def test_a_shortage_of_descriptors_passes_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """accept() fails at once, again and again, while a connection waits: that must not take a core."""
    tries: list[int] = []
    accept = socket.socket.accept

    def short(listener: socket.socket) -> Any:
        tries.append(1)
        if len(tries) <= 5:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    with parent() as listener, connect(listener.addresses, KEY, 1, 0, soon()) as end, links_of(listener)[1] as link:
        check_link(link, end)
    assert 6 <= len(tries) < 20


def test_a_child_that_gave_up_waiting_gets_a_link_at_its_next_try() -> None:
    """Of several connections of a child, the one that it has proven last counts."""
    with parent((1, 2)) as listener:
        for _ in range(2):
            as_child(_secret(KEY), listener.addresses[0]).close()
        ends = {child: connect(listener.addresses, KEY, child, 0, soon()) for child in (1, 2)}
        links = links_of(listener)
        for child, end in ends.items():
            with end, links[child]:
                check_link(links[child], end)


def test_a_child_that_does_not_come_is_missing_in_time() -> None:
    with parent((1, 2)) as listener, connect(listener.addresses, KEY, 2, 0, soon()):
        links = listener.links(soon(0.8))
        assert list(links) == [2]
        links[2].close()


def test_an_unreachable_parent_is_explained() -> None:
    port = refused_port()
    with pytest.raises(StartupError) as caught:
        connect([(HERE, port), ("192.0.2.1", 9), ("2001:db8::1", 9)], KEY, 3, 1, soon(0.7))
    for words in ["node 3", "node 1", f"{HERE}:{port}", "192.0.2.1:9", "[2001:db8::1]:9", "HVDLITE_NETWORK_INTERFACES"]:
        assert words in str(caught.value)


def test_a_child_short_of_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", short)
    with pytest.raises(StartupError, match="Too many open files"):
        connect([(HERE, 9)], KEY, 3, 1, soon(0.5))


def test_leaders_meet_in_a_tree_and_only_those_with_children_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six nodes of which each leads up to two; ranks 6 and 7 lead none."""
    opened: list[int] = []
    make = Listener.__init__

    def counted(self: Listener, interfaces: Any, key: bytes, node_index: int, children: Any) -> None:
        opened.append(node_index)
        make(self, [LO], key, node_index, children)

    monkeypatch.setattr(Listener, "__init__", counted)
    nodes = ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    leaders = [0, 1, 2, 3, 4, 5]
    before = open_files()

    def work(comm: Any) -> dict[int, socket.socket]:
        return connect_leaders(comm, leaders, Topology(comm.rank, nodes), 2, "lo", soon())

    links = on_ranks(8, work)
    assert sorted(opened) == [0, 1, 2]
    assert [sorted(of_rank) for of_rank in links] == [[1, 2], [0, 3, 4], [0, 5], [1], [1], [2], [], []]
    for parent_index, child in [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]:
        check_link(links[parent_index][child], links[child][parent_index])
    for of_rank in links:
        for link in of_rank.values():
            link.close()
    assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_has_left_after_its_last_word_is_admitted() -> None:
    """What it has said beyond the proof can be read then."""
    admitted: list[socket.socket] = []

    def admit(link: socket.socket, claim: bytes, session: bytes) -> bool:
        admitted.append(link)
        return True

    listener, secret = socket.socket(socket.AF_UNIX), Secret(KEY, b"test", 0)
    listener.bind("")
    listener.listen()
    hearing = Hearing([listener], secret, admit)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(listener.getsockname())
        caller = Caller(secret, link, b"")
        link.sendall(caller.hello)
        while not select.select([link], [], [], 0)[0]:
            hearing.serve()
        link.sendall(caller.answer(link.recv(Caller.answer_bytes, socket.MSG_WAITALL)) + b"last words")
    while not admitted:
        hearing.serve()
    assert admitted[0].recv(64) == b"last words"
    admitted[0].close()
    hearing.close()
