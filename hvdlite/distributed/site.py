"""Where the tensors of a call of a process group are, and what that means for the call: on the host, here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from hvdlite.distributed.collectives import Collectives, Run
from hvdlite.distributed.post import Post
from hvdlite.distributed.work import GroupWork, Waited

Tensors = list[torch.Tensor]
Note = Callable[[GroupWork, Tensors], None]


class SiteGroup(Waited, Protocol):
    """A group, as its sites ask it."""

    @property
    def timeout_s(self) -> float: ...

    def timeout(self, timeout_s: float | None) -> AbstractContextManager[None]:
        """In the ``with`` block; None: as ever."""


class Site(Protocol):
    """Calls on tensors of one kind of memory."""

    @property
    def collectives(self) -> Collectives: ...

    def work(self, run: Run, result: Tensors, title: str, limit_s: float | None) -> GroupWork:
        """For ``run`` of `collectives`, with this timeout; None: that of the group."""

    def send(self, tensors: Tensors, to: int, tag: int, title: str, note: Note) -> GroupWork:
        """Begin to send the only one of ``tensors``.

        Args:
            note: called with the work and ``tensors`` before that may be done.
        """

    def receive(self, tensors: Tensors, source: int, tag: int, title: str, note: Note) -> GroupWork:
        """Begin to receive into the only one of ``tensors``; likewise."""


class HostSite:
    """See `Site`."""

    def __init__(self, collectives: Collectives, post: Post, group: SiteGroup) -> None:
        self.collectives = collectives
        self._post = post
        self._group = group

    def work(self, run: Run, result: Tensors, title: str, limit_s: float | None) -> GroupWork:
        def within() -> None:
            with self._group.timeout(limit_s):
                run()

        return GroupWork(run if limit_s is None else within, result, title, self._group)

    def send(self, tensors: Tensors, to: int, tag: int, title: str, note: Note) -> GroupWork:
        work = GroupWork(None, tensors, title, self._group)
        note(work, tensors)
        self._post.send(tensors[0], to, tag, work, self._group.timeout_s)
        return work

    def receive(self, tensors: Tensors, source: int, tag: int, title: str, note: Note) -> GroupWork:
        work = GroupWork(None, tensors, title, self._group)
        note(work, tensors)
        self._post.receive(tensors[0], source, tag, work, self._group.timeout_s)
        return work
