"""Training loops of some models are steady: what `make zoo ZOO_ARGS=--steady` asks of all of them.

Nothing is compiled here but in the last test: traces, captures and calls that run their Python are counted.
"""

from __future__ import annotations

import importlib.util

import pytest
import torchlazy

from tests.zoo.modules import MODULES
from tests.zoo.run import all_cases
from tests.zoo.steady import THREE_SIZES, Loop, measure_steadiness

has_transformers = importlib.util.find_spec("transformers") is not None
BETWEEN = (Loop("between", warm=5, watched=3),)


@pytest.fixture(autouse=True)
def _settings():
    kept = torchlazy.config.tiers, torchlazy.config.store
    yield
    torchlazy.sync()
    torchlazy.config.tiers, torchlazy.config.store = kept


@pytest.mark.parametrize("way", ["lazy", "step", "module"])
@pytest.mark.parametrize("name", ["resnet", "gan", "autoencoder"])
def test_module(name: str, way: str) -> None:
    result = measure_steadiness(MODULES[name], way, BETWEEN)
    assert result["outcome"] == "steady", result


@pytest.mark.skipif(not has_transformers, reason="transformers is not installed (pip install -e '.[bench]')")
@pytest.mark.parametrize(("name", "way"), [("hf_bert", "lazy"), ("hf_bert", "module"), ("hf_gpt2", "step")])
def test_transformers(name: str, way: str) -> None:
    """They look at their masks before they compute, which is no cut."""
    result = measure_steadiness(all_cases()[name], way, BETWEEN)
    assert result["outcome"] == "steady", result
    assert "bool" not in result["loops"]["between"]["cuts"], result


def test_sizes_that_take_turns_compile_nothing_more() -> None:
    loops = (Loop("between", THREE_SIZES, warm=3, watched=1),)
    result = measure_steadiness(MODULES["siamese_triplet"], "lazy", loops, compiles=True)
    assert result["outcome"] == "steady", result


def test_what_moves_is_told() -> None:
    """Sizes that depend on data: a loop that is not steady is not called so, and the report's reasons are there."""
    result = measure_steadiness(MODULES["mixture_of_experts"], "step", (Loop("after", warm=3, watched=3),))
    found = result["loops"]["after"]
    assert result["outcome"] == "moving" and found["moved"]["captures"] == 3
    assert any("size" in reason for reason in found["reasons"]) and any("nonzero" in op for op in found["at once"])
