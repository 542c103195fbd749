"""`torch.compile` around what is recorded (lazy tensors, compiled callables) leaves the recorder alone."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo

BACKENDS = ["eager", "aot_eager", "torchlazy"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_on_the_lazy_device(backend: str) -> None:
    """`module.compile` in place; forward, backward and optimizer are recorded as without it."""
    own, other = _model(), _model().to("lazy")
    other.compile(backend=backend)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (own, other)]
    for _ in range(6):
        x = torch.randn(3, 4)
        losses = []
        for model, optimizer, given in zip((own, other), optimizers, (x, x.to("lazy")), strict=True):
            loss = model(given).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_of_lazy_tensors(backend: str) -> None:
    def fn(a: torch.Tensor) -> torch.Tensor:
        b = torch.zeros(a.shape[1], device=a.device)
        b = b + a.sum(0)
        return (a * 2 - b).relu().sum(-1)

    program = torch.compile(fn, backend=backend)
    for rows in (3, 3, 5, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(program(x.to("lazy")).cpu(), fn(x))


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torchlazy.compile
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


_doubled = torchlazy.compile(lambda x: x * 2)


def _calls_a_compiled_one(x: torch.Tensor) -> torch.Tensor:
    return _doubled(x + 1) - 1


@pytest.mark.parametrize("backend", ["eager", "torchlazy"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (Decorated(), None),
        lambda: (torchlazy.compile(_model()), None),
        lambda: (_calls_a_compiled_one, lambda x: (x + 1) * 2 - 1),
    ],
    ids=["forward", "module", "function"],
)
def test_compiled_callables_within(backend: str, make: Callable[[], tuple[Any, Any]]) -> None:
    program, expected = make()
    expected = expected or copy.deepcopy(program)
    captured = torch.compile(program, backend=backend)
    for _ in range(5):
        x = torch.randn(3, 4)
        torch.testing.assert_close(captured(x), expected(x))
    assert _doubled.report().replays > 0 or program is not _calls_a_compiled_one


def test_what_has_no_code_cannot_be_left_alone() -> None:
    with pytest.raises(TypeError, match="has no Python code"):
        exclude_from_dynamo(len)


def test_a_compiled_callable_names_itself() -> None:
    assert "lambda" in repr(_doubled) and repr(_doubled).startswith("torchlazy.compile(")
