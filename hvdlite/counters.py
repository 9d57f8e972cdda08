"""What a rank counts about itself, always: integers kept by the part that they are about, and read on demand."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Traffic:
    """Messages over links of one kind, as this rank sees them."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def sent(self, nbytes: int) -> None:
        self.messages_sent += 1
        self.bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        self.messages_received += 1
        self.bytes_received += nbytes

    def named(self, link: str) -> dict[str, int]:
        """Its counts, with ``link`` before each name."""
        return {f"{link}_{name}": count for name, count in asdict(self).items()}
