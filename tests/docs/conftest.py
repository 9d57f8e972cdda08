"""Puts tools/ where these tests find it: what the site is made with reads pages too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
