"""What a coordinator asks of the world that it works for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdlite.config import Config
from hvdlite.coordinator.burst import Burst, KnownBurst
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.prepared import PreparedBurst
from hvdlite.coordinator.readiness import Early
from hvdlite.coordinator.submission import Submission
from hvdlite.recorder import Recorder


class Owner(Protocol):
    """Whom a coordinator works for. All but `check` is called by who is at work, in the order of the log."""

    config: Config
    recorder: Recorder

    def check(self) -> None:
        """Raise the reason once the world has failed."""

    @property
    def execute(self) -> Callable[[Sequence[tuple[Response, Submission | None]]], object]:
        """Does what all ranks agreed on, at once, and returns what the user gets.

        None is what this rank has not submitted, since it has joined.
        """

    @property
    def is_under_way(self) -> bool:
        """Whether something that was executed has yet to be done by a GPU."""

    def watch(self) -> None:
        """See that what is under way goes on; raises what ends the world."""

    @property
    def early(self) -> Early | None:
        """Operations that may begin before all ranks are ready, where ranks are on several nodes."""

    @property
    def execute_burst(self) -> Callable[[Burst], object]:
        """Does all of a burst at once, as all ranks do."""

    def prepare_burst(self, known: KnownBurst) -> PreparedBurst | None:
        """What does that of a burst of few bytes as well; None of any other."""

    def withdraw(self) -> None:
        """A plan that ran free has ended: what prepared operations have begun, and not done, will not be."""

    def coordinator_died(self, error: BaseException) -> None:
        """What has ended the coordinator before its time."""

    def take_notice(self, content: dict[str, Any]) -> None:
        """What concerns the whole world, and is none of the coordinator's business."""
