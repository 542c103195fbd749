"""The cases of test_distributed.py through NCCL: one pair of processes, within four minutes, on one or two GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.lazy import distributed_cases as cases
from tests.lazy.distributed_run import FORMS, Told, cases_of, run_world, wrong

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run_world(2, tmp_path_factory.mktemp("nccl"), "cuda", each=25, total=210)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in cases_of(2) if name != cases.GONE])
def test_through_nccl(told: Told, name: str, form: str) -> None:
    if name == "low rank" and "device" in form:
        pytest.skip("torch's PowerSGD hook calls torch.cuda.synchronize with the device of the gradients")
    if text := wrong(told, f"{name} / {form}"):
        pytest.fail(text, pytrace=False)
