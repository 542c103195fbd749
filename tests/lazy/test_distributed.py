"""Collectives and DistributedDataParallel on the CPU: in `lazy_mode`, compiled and on the lazy device as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed

from tests.lazy import distributed_cases as cases
from tests.lazy.distributed_run import FORMS, Told, cases_of, run_world, wrong

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Told]:
    """What the processes of a world of that size said of each case."""
    known: dict[int, Told] = {}

    def of(world: int) -> Told:
        if world not in known:
            known[world] = run_world(world, tmp_path_factory.mktemp(f"world{world}"))
        return known[world]

    return of


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for world in (2, 1) for name in cases_of(world) if name != cases.GONE]
)
def test_as_eager(told: Callable[[int], Told], name: str, world: int, form: str) -> None:
    if text := wrong(told(world), f"{name} / {form}"):
        pytest.fail(text, pytrace=False)


def test_a_peer_that_is_gone_is_told_with_the_collective(told: Callable[[int], Told]) -> None:
    assert told(2)[0][f"{cases.GONE} / device compiled"] == ""
