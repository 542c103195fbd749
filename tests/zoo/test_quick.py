"""Six hand-written models and three of the transformers library train as in eager, in every run of the tests.

`make zoo` trains all of them, each in a process of its own.
"""

from __future__ import annotations

import importlib.util

import pytest
import torchlazy

from tests.zoo.modules import MODULES
from tests.zoo.run import all_cases, measure

COMPILED = ("gnn_scatter", "dlrm_embedding_bag", "wavenet", "capsules", "ppo_torch_func", "gradient_penalty")
TRANSFORMERS = ("hf_falcon", "hf_mixtral", "hf_patchtst")
has_transformers = importlib.util.find_spec("transformers") is not None


@pytest.fixture(autouse=True)
def _settings():
    kept = torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store
    yield
    torchlazy.sync()
    torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store = kept


@pytest.mark.parametrize("name", COMPILED)
def test_module(name: str) -> None:
    result = measure(MODULES[name], "compiled")
    assert result["outcome"] == "equal", result
    assert set(result["cuts"]) <= {"optimizer step", "flush"}


@pytest.mark.skipif(not has_transformers, reason="transformers is not installed (pip install -e '.[bench]')")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    result = measure(all_cases()[name], "lazy")
    assert result["outcome"] == "equal", result
