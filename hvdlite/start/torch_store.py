"""Where the ranks of torchrun meet, and of whoever else sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE."""

from __future__ import annotations

import hmac
import importlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from hvdlite.errors import CollectiveError, HorovodInternalError, StartupError
from hvdlite.launched import Launched
from hvdlite.naps import Patience, growing_pause_s
from hvdlite.start.rendezvous import START_LIMIT, MissingError

_TRIES_SHARE = 1 / 3  # torch tries to connect once more, after up to twice as long as it has tried before
_PROOF_BYTES = 32  # of SHA-256
# Between two looks for all ranks. Each names all of them, so many ranks look less often.
_FIRST_NAP_S_PER_RANK = 20e-6
_LONGEST_NAP_S, _LONGEST_NAP_S_PER_RANK = 20e-3, 1e-3


class InGivenStore:
    """A `hvdlite.start.rendezvous.Place` in ``store``, which is one of torch.distributed.

    Args:
        key: proves which values are of these ranks; empty: they have none, and believe whoever reaches the store.
        limit: what sets the time that ranks have to come, for errors.
        obstacle: why one of the ranks that are waited for cannot come any more, once that is so.
    """

    def __init__(
        self,
        store: Any,
        key: bytes = b"",
        limit: str = START_LIMIT,
        obstacle: Callable[[], CollectiveError | StartupError | None] = lambda: None,
    ) -> None:
        self._store = store
        self._key = key
        self._limit = limit
        self._obstacle = obstacle

    def gather(self, key: str, ranks: Sequence[int], rank: int, data: bytes, patience: Patience) -> list[bytes]:
        """See `hvdlite.start.rendezvous.Place`."""
        names = {other: f"{key}/{other}" for other in ranks}
        timeout_s = patience.left_s
        try:
            self._store.set(names[rank], self._proof(names[rank], data) + data)
            if not self._come(list(names.values()), patience):
                missing = [other for other in ranks if not self._store.check([names[other]])]
                if missing:
                    raise MissingError.late(missing, timeout_s, self._limit)
            return [self._proven(name, self._store.get(name)) for name in names.values()]  # few have multi_get
        except (StartupError, HorovodInternalError):
            raise
        except RuntimeError as error:
            if (obstacle := self._obstacle()) is not None:
                raise obstacle from None
            raise StartupError(f"the store of torch.distributed, where ranks meet, is gone: {error}") from error

    def _come(self, names: list[str], patience: Patience) -> bool:
        """Whether all ``names`` are there in time. Asks for them again and again: no other thread could end torch's own
        wait when a rank dies, and each of its timeouts writes two warnings."""
        first_s = _FIRST_NAP_S_PER_RANK * len(names)
        longest_s = max(_LONGEST_NAP_S, _LONGEST_NAP_S_PER_RANK * len(names))
        naps = itertools.count()

        def have_come(most_s: float) -> bool:
            obstacle = self._obstacle()  # before a look at the store: a rank may have come, and then left
            if self._store.check(names):
                return True
            if obstacle is not None:
                raise obstacle
            time.sleep(min(most_s, growing_pause_s(first_s, longest_s, next(naps))))
            return False

        return patience.wait_for(have_come)

    def _proof(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + data, "sha256") if self._key else b""

    def _proven(self, name: str, found: bytes) -> bytes:
        size = _PROOF_BYTES if self._key else 0
        shown, data = found[:size], found[size:]
        if not hmac.compare_digest(shown, self._proof(name, data)):
            raise StartupError(f"another program has written {name} into the store of torch.distributed")
        return data


class InStore(InGivenStore):
    """A `hvdlite.start.rendezvous.Place` in the store that torch's own ``env://`` would take.

    torchrun keeps that store itself, and a part of it for each restart of the ranks; elsewhere rank 0 does, for
    torch.distributed too if the program uses it.

    Args:
        environ: of ``process``.
        timeout_s: the longest wait for the store.

    Raises:
        StartupError: the store cannot be reached, or ``environ`` names none.
    """

    def __init__(self, process: Launched, environ: Mapping[str, str], timeout_s: float) -> None:
        distributed: Any = importlib.import_module("torch.distributed")  # only where it is needed: it is slow to import
        if not distributed.is_available():
            raise StartupError("this torch was built without torch.distributed: start the ranks with hvdliterun")
        is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise StartupError(f"MASTER_PORT={port}: must be between 1 and 65535")
        try:
            store = distributed.TCPStore(
                host,
                int(port),
                process.size,
                process.rank == 0 and not is_agents,
                timedelta(seconds=_TRIES_SHARE * timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise StartupError(
                f"rank {process.rank} cannot reach the store of torch.distributed at MASTER_ADDR={host} and "
                f"MASTER_PORT={port}, where ranks meet: {str(error).splitlines()[0].rstrip('.')}. If the start is only "
                "slow, raise HVDLITE_START_TIMEOUT (seconds)"
            ) from error
        super().__init__(distributed.PrefixStore(f"hvdlite/{attempt}", store))
