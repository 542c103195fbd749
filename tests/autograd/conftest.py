"""Traces are caught where the recorder in Python cuts them."""

from __future__ import annotations

import pytest
import torchlazy


@pytest.fixture(autouse=True)
def device_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on "lazy" are recorded in Python."""
    monkeypatch.setattr(torchlazy.config, "native_device", "off")
