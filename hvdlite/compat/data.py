"""`horovod.data`: data loaders whose batches a thread prepares, while the ones before are used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_LOOK_S = 0.2  # how long the thread may take to see that the loader was closed
_END = object()


class BaseDataLoader:
    """Yields the batches of `_iterate`; subclasses define that, and ``__len__``."""

    def __len__(self) -> int:
        """Number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """The batches of an epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return map(self._process_batch, self._iterate())

    def _process_batch(self, batch: Any) -> Any:
        """Called on each batch by whoever iterates; for trainers, to reshape it."""
        return batch


class AsyncDataLoaderMixin:
    """Stands before a `BaseDataLoader` among the bases of a class: a thread runs `_iterate`, epoch after epoch.

    What it raises, the iteration raises.

    Args:
        async_loader_queue_size: most batches that are ready; 0: no thread.
    """

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(max(async_loader_queue_size, 1))
        self.thread = threading.Thread(target=self._async_worker, name="hvdlite data loader", daemon=True)

    def close_async_loader(self) -> None:
        """End the thread. May be called again; nothing can be iterated afterwards."""
        self.finished_event.set()
        if self.started:
            self.thread.join()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self._next()) is not _END:
            if isinstance(batch, _Raised):
                raise batch.error
            yield self._process_batch(batch)  # type: ignore[attr-defined]

    def _next(self) -> Any:
        """The next batch; `_END` where the loader was closed."""
        while not self.finished_event.is_set():
            try:
                return self.queue.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
        return _END

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put(batch):
                        return
                if not self._put(_END):
                    return
        except Exception as error:
            self._put(_Raised(error))
            self._put(_END)

    def _put(self, batch: Any) -> bool:
        """Whether the loader is open still."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(batch, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error
