"""The runner of tests with several processes tells what goes wrong in one of them, and runs the others' cases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from tests.lazy.distributed_run import run_world, wrong

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
COMPILED = ()


def _hangs(form: str, rank: int) -> None:
    if form == "device compiled":
        time.sleep(100)


def _dies(form: str, rank: int) -> None:
    if form == "device compiled":
        os._exit(3)


def _differs(form: str, rank: int) -> list[torch.Tensor]:
    return [torch.ones(2) * (1 + (form == "compile"))]


def cases_of(world: int) -> dict[str, Callable[[str, int], Any]]:
    return {"differs": _differs, "dies": _dies, "hangs": _hangs}


def test_what_goes_wrong_is_told_and_the_others_run(tmp_path: Path) -> None:
    told = run_world(1, tmp_path, each=10, of=(__name__,))
    assert "not close" in wrong(told, "differs / compile") and wrong(told, "differs / device") == ""
    assert "{0: 3} died" in wrong(told, "dies / device compiled")
    assert "in _hangs" in (text := wrong(told, "hangs / device compiled")) and "longer than 10 s" in text
    assert wrong(told, "dies / device") == wrong(told, "hangs / device") == ""
