"""The pause of the cycle collector: nested, and whatever its state was before."""

from __future__ import annotations

import gc

import pytest
from torchlazy.runtime.collector import is_on, paused_collector


def test_the_collector_is_on_again_after_the_outermost_block() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collector():
        with paused_collector():
            assert gc.isenabled() and not is_on(), "the program does not see the pause"
        assert not is_on()
        raise KeyError
    assert gc.isenabled() and is_on()


def test_what_the_program_switches_in_a_pause_holds_afterwards() -> None:
    for switch in (gc.disable, gc.enable):
        with paused_collector():
            switch()
            assert not is_on()
            assert gc.isenabled() is (switch is gc.enable)
        assert gc.isenabled() is is_on() is (switch is gc.enable)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
