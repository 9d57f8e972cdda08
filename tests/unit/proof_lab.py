"""Who calls, and is hung up on before a proof."""

from __future__ import annotations

import pytest

from hvdlite.links.proof import Host


def hang_up_on_the_first(monkeypatch: pytest.MonkeyPatch, times: int) -> list[bytes]:
    """As where who listens has more strangers to hear than it lets wait; returns what it hears."""
    feed, heard = Host.feed, []

    def hang_up(host: Host, data: bytes) -> bytes:
        heard.append(data)
        if len(heard) <= times:
            raise ConnectionError("one too many")
        return feed(host, data)

    monkeypatch.setattr(Host, "feed", hang_up)
    return heard
