"""In which order, and on which thread, the calls of a process group are done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

_LOOK_S = 0.02  # between looks whether what was put off may still wait


class Task(Protocol):
    """Something to be done once.

    Attributes:
        title: what people call it.
        takes_processors: the thread that does it works on memory of the host.
    """

    title: str
    takes_processors: bool

    def perform(self) -> None:
        """Do it; what goes wrong is kept for whoever waits for it."""

    @property
    def is_over(self) -> bool: ...


class Lane:
    """Does tasks one at a time, in the order in which they came.

    Whoever waits for a task does it, and what comes before it, unless another thread is at it. The lane's own thread is
    started by the first task that nobody waits for, and sleeps when there is nothing to do, or all that there is was
    put off. What a callback of a task adds is done at once, before what waits already: how much that is differs between
    ranks, and their orders must not.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[Task] = deque()
        self._turn = threading.Lock()  # held by whoever takes tasks from the queue and does them
        self._doer: int | None = None  # the thread that holds it
        # For the thread: whether to go on, at once; or whether what was put off may still wait.
        self._news: SimpleQueue[bool | Callable[[], bool]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_tasks(self) -> bool:
        return bool(self._tasks)

    def do(self, task: Task) -> bool:
        """Do ``task`` now if nothing is before it; whether it was done. Otherwise it was added."""
        if not self._tasks and self._turn.acquire(blocking=False):
            self._doer = threading.get_ident()
            try:
                if not self._tasks:  # otherwise another thread has added some meanwhile
                    task.perform()
                    return True
            finally:
                self._doer = None
                self._turn.release()
        self.add(task)
        return False

    def add(self, task: Task) -> None:
        """Do ``task`` later; at once where a callback of another task adds it, which may wait for it by any means."""
        self._add(task, True)

    def put_off(self, task: Task, may_wait: Callable[[], bool]) -> None:
        """Do ``task`` when somebody waits for it, or adds another one, or calls `catch_up`; likewise at once.

        Args:
            may_wait: asked every 20 ms while there is something to do, which is done once it returns False.
        """
        self._add(task, may_wait)

    def catch_up(self) -> None:
        """Do what there is, unless another thread is doing something."""
        self._help(lambda: False)

    def assist(self, task: Task) -> None:
        """Do what there is up to ``task``, unless another thread is doing something.

        A thread that is at it itself, and waits for another task in a callback, goes on with that.
        """
        self._help(lambda: task.is_over)

    def _add(self, task: Task, news: bool | Callable[[], bool]) -> None:
        if self._doer == threading.get_ident():
            task.perform()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.append(task)
        self._news.put(news)

    def _help(self, is_enough: Callable[[], bool]) -> None:
        is_doer = self._doer == threading.get_ident()
        if not is_doer and not self._turn.acquire(blocking=False):
            return
        self._doer = threading.get_ident()
        try:
            while self._tasks and not is_enough():
                self._tasks.popleft().perform()
        finally:
            if not is_doer:
                self._doer = None
                self._turn.release()

    def tell(self, callbacks: Callable[[], object]) -> None:
        """See `hvdlite.distributed.work.Doer`. What they add, and may wait for, is done at once."""
        callbacks()

    def close(self, timeout_s: float) -> bool:
        """Do what there is, and end the thread, unless it is the caller; whether it has ended in time."""
        if self._thread is None:
            return True
        self._news.put(False)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._has_to_go_on()
            with self._turn:
                self._doer = threading.get_ident()
                try:
                    while self._tasks:
                        self._tasks.popleft().perform()
                finally:
                    self._doer = None

    def _has_to_go_on(self) -> bool:
        """Returns when what there is has to be done: True, or for the last time."""
        news = self._news.get()
        while not isinstance(news, bool):
            may_wait = news
            try:
                news = self._news.get(timeout=_LOOK_S)
            except Empty:
                if not self._tasks:
                    news = self._news.get()
                elif not may_wait():
                    news = True
        return news
