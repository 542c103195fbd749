"""Collectives and DistributedDataParallel on the CPU: in `lazy_mode`, compiled and on the lazy device as in eager."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed

from tests.lazy import distributed_cases as cases

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
_SECONDS = 300


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, str]]]:
    """What the processes of a world of that size said of each case, one dictionary for each process."""
    known: dict[int, list[dict[str, str]]] = {}

    def of(world: int) -> list[dict[str, str]]:
        if world not in known:
            known[world] = run_world(world, tmp_path_factory.mktemp(f"world{world}"))
        return known[world]

    return of


def run_world(world: int, folder: Path, target: str = "cpu") -> list[dict[str, str]]:
    """What each process of a world wrote."""
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=cases.child, args=(rank, world, str(folder), target)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join(_SECONDS if target == "cpu" else 2 * _SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
    files = [folder / f"told{world}_{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("name", cases.COLLECTIVES)
def test_collectives(told: Callable[[int], list[dict[str, str]]], name: str, form: str) -> None:
    wrong = [one.get(f"{name} / {form}", "never came to it") for one in told(2)]
    assert wrong == ["", ""], "\n".join(wrong)


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 2) for name in cases.MODELS), *((name, 1) for name in cases.ALONE)]
)
def test_data_parallel(told: Callable[[int], list[dict[str, str]]], name: str, form: str, world: int) -> None:
    assert [one.get(f"{name} / {form}", "never came to it") for one in told(world)] == [""] * world
