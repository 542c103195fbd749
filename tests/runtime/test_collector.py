"""The pause of the cycle collector: nested, and whatever its state was before."""

from __future__ import annotations

import gc

import pytest
from torchlazy.runtime.collector import paused_collector


def test_the_collector_is_on_again_after_the_outermost_block() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collector():
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
