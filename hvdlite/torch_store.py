"""Where the ranks of torchrun meet, and of whoever else sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hvdlite.errors import StartupError
from hvdlite.rendezvous import MissingError


class InStore:
    """A `hvdlite.rendezvous.Place` in the store to which torch's ``env://`` leads.

    torchrun keeps that store itself, a new part of it for each restart of the ranks; elsewhere rank 0 does, for
    torch.distributed too if the program uses it.

    Raises:
        StartupError: the store cannot be reached within ``timeout_s``.
    """

    def __init__(self, timeout_s: float) -> None:
        distributed: Any = importlib.import_module("torch.distributed")  # only where it is needed: it is slow to import
        if not distributed.is_available():
            raise StartupError("this torch was built without torch.distributed: start the ranks with hvdliterun")
        try:
            store, _, _ = next(distributed.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        except (RuntimeError, ValueError) as error:
            raise StartupError(
                f"ranks cannot meet in the store of torch.distributed at MASTER_ADDR and MASTER_PORT: {error}. If the "
                "start is only slow, raise HVDLITE_START_TIMEOUT (seconds)"
            ) from error
        self._store = distributed.PrefixStore("hvdlite", store)

    def gather(self, key: str, ranks: Sequence[int], rank: int, data: bytes, timeout_s: float) -> list[bytes]:
        """See `hvdlite.rendezvous.Place`."""
        names = {other: f"{key}/{other}" for other in ranks}
        try:
            self._store.set(names[rank], data)
            try:
                self._store.wait(list(names.values()), timedelta(seconds=timeout_s))
            except RuntimeError:
                missing = [other for other in ranks if not self._store.check([names[other]])]
                if missing:
                    raise MissingError.late(missing, timeout_s) from None
            return [bytes(part) for part in self._store.multi_get(list(names.values()))]
        except RuntimeError as error:
            if isinstance(error, StartupError):
                raise
            raise StartupError(f"the store of torch.distributed, where ranks meet, is gone: {error}") from error
