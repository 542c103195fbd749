"""What a captured call does to random generators: draws, seeds, and programs that draw by themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.compiled.capture.random import WatchedGenerators
from torchlazy.lazy.compiled.template.template import Rewind


def watched(steps: list[Any], refused: list[str]) -> WatchedGenerators:
    return WatchedGenerators(steps, lambda read: read(), refused.append)


@pytest.mark.parametrize("seeds", ["never", "before", "after"])
def test_a_program_that_draws_by_itself_is_no_seeding(seeds: str) -> None:
    """As attention with dropout does on a GPU; what Python sets before and after is seen all the same."""
    generator, steps, refused = torch.Generator().manual_seed(1), list[Any](), list[str]()
    generators = watched(steps, refused)
    generators.begin([generator])
    if seeds == "before":
        generator.manual_seed(5)
    generators.before_program()
    steps.append("program")
    torch.rand(3, generator=generator)
    generators.after_program()
    if seeds == "after":
        generator.manual_seed(5)
    generators.draws(generator)
    assert bool(refused) == (seeds != "never")


def test_a_state_that_a_program_left_can_be_gone_back_to() -> None:
    generator, steps, refused = torch.Generator().manual_seed(1), list[Any](), list[str]()
    generators = watched(steps, refused)
    generators.begin([generator])
    generators.before_program()
    steps.append("program")
    torch.rand(3, generator=generator)
    generators.after_program()
    state = generator.get_state()
    generators.draws(generator)
    torch.rand(3, generator=generator)
    steps.append("draw")
    generators.drew(generator)
    generator.set_state(state)
    generators.draws(generator)
    assert not refused and steps[:2] == ["program", "draw"] and isinstance(steps[2], Rewind)


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_graph_that_the_call_used_up_is_not_read_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own draws are ordinary tensors: what autograd kept of them is gone after a backward within."""
    monkeypatch.setattr(torchlazy.config, "rng", "eager")

    def inner(x: torch.Tensor) -> torch.Tensor:
        w = torch.rand(4, device=x.device, requires_grad=True)
        y = (w * x).exp()
        y.sum().backward()
        return y.sin()

    def applied(x: torch.Tensor) -> torch.Tensor:
        w = torch.rand(4, device=x.device, requires_grad=True)
        y = torch.nn.functional.layer_norm(w * x, (4,))
        torch.autograd.grad(y.sum(), [w])
        return y * w

    for program in (inner, applied):
        compiled = torchlazy.compile(program)
        for step in range(5):
            x = torch.arange(4.0) + step
            torch.manual_seed(step)
            expected = program(x)
            torch.manual_seed(step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                found = compiled(x.to(device))
            torch.testing.assert_close(found.detach().cpu(), expected.detach())
            assert found.requires_grad == expected.requires_grad
