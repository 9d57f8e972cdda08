"""Fixtures of several modules."""

from __future__ import annotations

import pytest

from fake_world import Universe


@pytest.fixture
def universe(monkeypatch: pytest.MonkeyPatch) -> Universe:
    """In which hvdlite can be started as one of several ranks that are not there."""
    return Universe(monkeypatch)
