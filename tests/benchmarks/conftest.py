"""Small tensors for what measures the bandwidth of the memory."""

from __future__ import annotations

import pytest

from keyhole.bench import measure


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BANDWIDTH_BYTES", 1 << 16)
