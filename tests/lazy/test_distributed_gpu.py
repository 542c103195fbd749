"""Collectives and DistributedDataParallel over two GPUs, through NCCL, in each form as in eager."""

from __future__ import annotations

import pytest
import torch

from tests.lazy import distributed_cases as cases
from tests.lazy.test_distributed import run_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_world(2, tmp_path_factory.mktemp("gpus"), "cuda")


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("name", [*cases.COLLECTIVES, *cases.MODELS])
def test_two_gpus(told: list[dict[str, str]], name: str, form: str) -> None:
    wrong = [one.get(f"{name} / {form}", "never came to it") for one in told]
    assert wrong == ["", ""], "\n".join(wrong)
