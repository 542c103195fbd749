"""How exported programs are called: memory that arguments share, under transforms and in other programs, copies."""

import copy
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.export.front_door import ExportError


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x
        return self.seen * x


def test_arguments_that_are_only_read_may_share_memory() -> None:
    exported = torchlazy.export(lambda x, y: x * y, (torch.randn(4), torch.randn(4))).module()
    x = torch.randn(5)
    torch.testing.assert_close(exported(x[:4], x[1:]), x[:4] * x[1:])


def _exported() -> tuple[nn.Module, nn.Module]:
    layer = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    return torchlazy.export(layer, (torch.randn(2, 4),), dynamic={"input": {0: "n"}}).module(), layer


def test_an_exported_program_is_exported_and_compiled_within_others() -> None:
    inner, layer = _exported()
    x = torch.randn(5, 4)
    outer = torchlazy.export(lambda x: inner(x) + 1, (torch.randn(2, 4),), dynamic={"x": {0: "n"}}).module()
    torch.testing.assert_close(outer(x), layer(x).detach() + 1)
    compiled = torchlazy.compile(lambda x: inner(x) * 2)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), layer(x).detach() * 2)


def test_under_vmap() -> None:
    inner, layer = _exported()
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(torch.vmap(lambda one: inner(one))(x), layer(x).detach())


def test_copies_have_state_of_their_own() -> None:
    program = torchlazy.export(Counter(), (torch.ones(3),))
    module = program.module()
    other = copy.deepcopy(module)
    other(torch.ones(3))
    assert other.seen.sum() == 3 and module.seen.sum() == 0


@pytest.mark.parametrize("asks", [torch.equal, torch.allclose])
def test_a_comparison_that_gives_a_bool_needs_a_value(asks: Any) -> None:
    with pytest.raises(ExportError, match=f"'{asks.__name__}' needs a value on the host"):
        torchlazy.export(lambda x: x if asks(x, x + 1) else x * 2, (torch.ones(3),))


def test_a_recurrent_layer_in_training() -> None:
    """How large oneDNN's workspace is follows no formula, and nobody reads it."""
    layer = nn.LSTM(4, 6, batch_first=True, bidirectional=True).train()
    exported = torchlazy.export(lambda x: layer(x)[0], (torch.randn(3, 5, 4),), dynamic={"x": {0: "batch"}}).module()
    for batch in (3, 2, 7):
        x = torch.randn(batch, 5, 4)
        torch.testing.assert_close(exported(x), layer(x)[0].detach())


def test_random_numbers_at_once_are_no_constants() -> None:
    torchlazy.config.rng = "eager"
    with pytest.raises(ExportError, match=r"bernoulli_.*draws its numbers at once[\s\S]*test_export_calls"):
        torchlazy.export(lambda x: nn.functional.dropout(x, 0.5), (torch.ones(4),))


@pytest.mark.parametrize(
    "change",
    [{"scale": 3.0}, {"x": torch.ones(4, 5).double()}, {"y": torch.ones(3, 5)}, {"x": torch.ones(4, 6)}, {"other": 1}],
    ids=["a number", "a dtype", "equal sizes", "a fixed size", "a name"],
)
def test_a_call_that_it_was_not_exported_for_is_refused(change: Any) -> None:
    def fn(x: torch.Tensor, *, y: torch.Tensor, scale: float) -> torch.Tensor:
        return (x + y) * scale

    module = torchlazy.export(
        fn, (torch.ones(4, 5),), {"y": torch.ones(4, 5), "scale": 2.0}, dynamic={"x": {0: "n"}, "y": {0: "n"}}
    ).module()
    given = {"x": torch.ones(4, 5), "y": torch.ones(4, 5), "scale": 2.0}
    for run in (module, torchlazy.compile(module)):
        assert torch.equal(run(given["x"], y=given["y"], scale=2.0), fn(**given))
        changed = {**given, **change}
        with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError)):
            run(changed.pop("x"), **changed)
