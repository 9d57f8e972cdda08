"""Doors of process groups: ranks connect whoever else comes, and strangers end nothing."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from hvdlite.distributed import doors as doors_module
from hvdlite.distributed.doors import _CLAIM as CLAIM, Door, Entrance
from hvdlite.distributed.links import _HEADER as HEADER, Outgoing
from hvdlite.distributed.post import Post
from hvdlite.distributed.work import GroupWork
from hvdlite.errors import CollectiveError
from hvdlite.links import reception
from hvdlite.links.dial import Dial
from hvdlite.links.interfaces import Interface
from hvdlite.links.proof import Caller, Secret, prove
from hvdlite.links.reception import Hearing

HERE = "127.0.0.1"
LO = Interface("lo", HERE, up=True, loopback=True)
WAIT_S = 20.0


class Health:
    """Of ranks that do not die."""

    def __init__(self) -> None:
        self.reports: list[BaseException] = []

    def report(self, error: BaseException) -> None:
        self.reports.append(error)

    def wait_for_failure(self, timeout_s: float) -> None:
        return None


class Group:
    """Two ranks in this process, on one node or on two."""

    def __init__(self, *, is_near: bool) -> None:
        self.health = Health()
        self.entrances = [Entrance("", from_other_nodes=not is_near) for _ in range(2)]
        self.doors = [entrance.door for entrance in self.entrances]
        self.is_near = is_near
        self.posts: list[Post] = []

    def begin(self) -> None:
        for rank, entrance in enumerate(self.entrances):
            near = [0, 1] if self.is_near else [rank]
            health: Any = self.health
            self.posts.append(Post(entrance, self.doors, rank, near, [0, 1], "test", health, 50))

    def close(self) -> None:
        for post in self.posts:
            post.close(1.0)
        for entrance in self.entrances:
            entrance.close()

    def check_messages(self) -> None:
        """Each sends to the other at once, more than a socket takes, and all arrives."""
        sent = [torch.full((100_000,), rank + 1.0) for rank in range(2)]
        received = [torch.empty(100_000) for _ in range(2)]
        works = []
        for rank, post in enumerate(self.posts):
            for call, tensor in ((post.send, sent[rank]), (post.receive, received[rank])):
                work = GroupWork(None, [tensor], "message")
                call(tensor, 1 - rank, 0, work, WAIT_S)
                works.append((post, work))
        for post, work in works:
            while not work.is_over:
                post.assist(work)
            assert work.is_success(), work.exception()
        assert torch.equal(received[0], sent[1]) and torch.equal(received[1], sent[0])
        assert not self.health.reports

    def address(self) -> str | tuple[str, int]:
        """Of rank 0's door."""
        return self.doors[0].name if self.is_near else self.doors[0].addresses[0]


@pytest.fixture(params=[True, False], ids=["a node", "two nodes"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(doors_module, "select", lambda spec: [LO])
    before = set(os.listdir("/proc/self/fd"))
    made = Group(is_near=request.param)
    yield made
    made.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def link_to(group: Group) -> socket.socket:
    address = group.address()
    link = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    link.settimeout(5)
    try:
        link.connect(address)
    except BaseException:
        link.close()
        raise
    return link


def is_hung_up(link: socket.socket) -> bool:
    """Whatever it was told before."""
    try:
        while link.recv(64):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_ranks_reach_one_another(group: Group) -> None:
    group.begin()
    group.check_messages()


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (HEADER.pack(0, 1 << 60, 0), f"a message of {1 << 60} bytes, for which there is no memory"),
        (HEADER.pack(0, 5, 1), "an offer of 5 bytes, which is none that this rank may take"),
    ],
)
def test_a_rank_that_sends_nonsense_is_named(group: Group, said: bytes, what: str) -> None:
    group.begin()
    work = GroupWork(None, [], "recv")
    group.posts[0].receive(torch.empty(3), 1, 0, work, WAIT_S)
    with link_to(group) as link:
        prove(group.doors[0].secret, link, CLAIM.pack(1, True, 0))
        link.sendall(said)
        with pytest.raises(CollectiveError, match=f"process group test: rank 1 has sent {what}"):
            while not work.is_over:
                group.posts[0].assist(work)
            work.wait()
    assert isinstance(group.health.reports[0], CollectiveError)


def test_a_receiver_that_takes_what_was_not_offered_is_named(group: Group) -> None:
    group.begin()
    outgoing = group.posts[0]._outgoing[1] = Outgoing()
    outgoing.link, receiver = socket.socketpair()
    outgoing.link.setblocking(False)
    with receiver:
        receiver.sendall((7).to_bytes(8, "little"))
        with pytest.raises(
            CollectiveError, match="rank 1 has sent that it has taken the offers \\[7\\], of which some"
        ):
            group.posts[0]._serve(1)


def test_a_rank_that_there_is_not_is_hung_up_on(group: Group) -> None:
    group.begin()
    with link_to(group) as link:
        prove(group.doors[0].secret, link, CLAIM.pack(2, True, 0))
        assert is_hung_up(link)
    group.check_messages()


def test_ranks_of_other_nodes_come_by_ipv6_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(doors_module, "select", lambda spec: [Interface("lo", "::1", up=True, loopback=True)])
    group = Group(is_near=False)
    group.begin()
    assert [host for host, _ in group.doors[0].addresses] == ["::1"]
    group.check_messages()
    group.close()


def test_doors_are_at_chosen_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 is this host as well, and would be reached if they were everywhere."""
    monkeypatch.setattr(doors_module, "select", lambda spec: [LO])
    entrance = Entrance("lo", from_other_nodes=True)
    ((host, port),) = entrance.door.addresses
    assert host == HERE
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    entrance.close()


def test_addresses_that_lead_nowhere_or_to_strangers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.0/24 is for documentation (RFC 5737): packets to it are dropped or refused, wherever this runs."""
    monkeypatch.setattr(doors_module, "select", lambda spec: [LO])
    group = Group(is_near=False)
    with socket.create_server((HERE, 0)) as silent, socket.create_server((HERE, 0)) as gone:
        gone.close()
        group.doors = [
            Door(door.name, (("192.0.2.1", 9), silent.getsockname(), *door.addresses), door.key) for door in group.doors
        ]
        group.begin()
        group.check_messages()
        silent.settimeout(5)
        link, _ = silent.accept()
        with link:
            assert group.doors[0].key not in link.recv(1 << 16)
    group.close()


def test_strangers_who_say_nothing_or_junk_come_before_the_ranks_and_in_numbers(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MOST_UNPROVEN", 20)
    junk = [b"", b"GET / HTTP/1.0\r\n\r\n" * 9, bytes(29), bytes(29 + 32), os.urandom(1 << 12)]
    with ExitStack() as open_links:
        links = [open_links.enter_context(link_to(group)) for _ in range(100)]
        for number, link in enumerate(links):
            link.sendall(junk[number % len(junk)])
        group.begin()
        group.check_messages()
        assert all(is_hung_up(link) for link in links[:20])


@pytest.mark.parametrize("has_silent_address", [False, True])
def test_a_rank_that_is_hung_up_on_for_the_sake_of_strangers_calls_again(
    monkeypatch: pytest.MonkeyPatch, *, has_silent_address: bool
) -> None:
    """Also where another address of the door does not answer."""
    monkeypatch.setattr(doors_module, "select", lambda spec: [LO])
    group = Group(is_near=not has_silent_address)
    hear, dropped = Hearing._hear, 0

    def drop_first(hearing: Hearing, link: socket.socket) -> None:
        nonlocal dropped
        dropped += 1
        if dropped <= 6:
            hearing._drop([link])
        else:
            hear(hearing, link)

    monkeypatch.setattr(Hearing, "_hear", drop_first)
    with socket.create_server((HERE, 0)) as silent:
        if has_silent_address:
            group.doors = [Door(door.name, (silent.getsockname(), *door.addresses), door.key) for door in group.doors]
        group.begin()
        group.check_messages()
    assert dropped > 6
    group.close()


def test_a_stranger_has_a_time_limit(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the group has nothing to do."""
    monkeypatch.setattr(reception, "PATIENCE_S", 0.2)
    group.begin()
    with link_to(group) as silent:
        assert is_hung_up(silent)
    group.check_messages()


def test_what_was_recorded_of_a_rank_proves_nothing(group: Group) -> None:
    group.begin()
    with link_to(group) as link:
        caller = Caller(group.doors[0].secret, link, CLAIM.pack(1, True, 0))
        link.sendall(caller.hello)
        challenge = link.recv(Caller.answer_bytes, socket.MSG_WAITALL)
        recorded = caller.hello + caller.answer(challenge)
    assert group.doors[0].key not in recorded + challenge
    with link_to(group) as link:
        link.sendall(recorded)
        assert len(link.recv(Caller.answer_bytes, socket.MSG_WAITALL)) == Caller.answer_bytes
        assert is_hung_up(link)
    with link_to(group) as link:
        wrong = Secret(bytes(32), group.doors[0].secret.purpose, CLAIM.size)
        with pytest.raises(ConnectionError):
            prove(wrong, link, CLAIM.pack(1, True, 0))
    group.check_messages()


def test_another_user_of_the_machine_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that knows the key."""
    group = Group(is_near=True)
    group.begin()
    monkeypatch.setattr("os.geteuid", lambda: 12345)  # so both ends belong to another user
    with link_to(group) as link, pytest.raises(ConnectionError):
        prove(group.doors[0].secret, link, CLAIM.pack(1, True, 0))
    monkeypatch.undo()
    group.check_messages()
    group.close()


def test_memory_is_read_only_of_a_rank_that_proves_where_its_own_is(group: Group) -> None:
    """A process of this user that knows one door's key cannot have this rank read another's memory."""
    group.begin()
    with link_to(group) as link:
        prove(group.doors[0].secret, link, CLAIM.pack(1, True, 4096))
        link.settimeout(0.3)
        with pytest.raises(TimeoutError):  # no word that memory may be read
            link.recv(8)
        group.check_messages()


def test_a_shortage_of_descriptors_ends_nothing_and_does_not_spin(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where ranks are to be heard, nor where they connect."""
    tries: dict[str, int] = {"accept": 0, "socket": 0}
    accept, make = socket.socket.accept, Dial._call

    def short(listener: socket.socket) -> Any:
        tries["accept"] += 1
        if tries["accept"] <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    def short_as_well(dial: Dial, address: Any) -> None:
        tries["socket"] += 1
        if tries["socket"] <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        make(dial, address)

    monkeypatch.setattr(socket.socket, "accept", short)
    monkeypatch.setattr(Dial, "_call", short_as_well)
    group.begin()
    group.check_messages()
    assert tries["accept"] < 20 and tries["socket"] < 20


def test_who_has_left_before_it_was_heard_ends_nothing(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, tries = socket.socket.accept, 0

    def gone(listener: socket.socket) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", gone)
    group.begin()
    group.check_messages()


def test_a_rank_that_has_left_is_an_error_at_once(group: Group) -> None:
    group.begin()
    group.posts.pop(0).close(1.0)
    (post,) = group.posts
    tensor = torch.zeros(1)
    for call in (post.send, post.receive):
        work = GroupWork(None, [tensor], "message")
        begun_s = time.monotonic()
        call(tensor, 0, 0, work, WAIT_S)
        while not work.is_over:
            post.assist(work)
        assert time.monotonic() - begun_s < WAIT_S / 2
        assert "rank 0 has left process group test" in str(work.exception())
    assert not group.health.reports
