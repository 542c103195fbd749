"""The cases of test_distributed.py over two GPUs, through NCCL: one pair of processes, within four minutes in all."""

from __future__ import annotations

import pytest
import torch

from tests.lazy import distributed_cases as cases
from tests.lazy.distributed_run import FORMS, Told, run_world, wrong

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run_world(2, tmp_path_factory.mktemp("gpus"), "cuda", each=25, total=210)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", cases.cases_of(2))
def test_two_gpus(told: Told, name: str, form: str) -> None:
    if text := wrong(told, f"{name} / {form}"):
        pytest.fail(text, pytrace=False)
