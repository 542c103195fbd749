"""How exported programs are called: memory that arguments share, under transforms and in other programs, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.runtime.exported.program import NotConvertible
from torchlazy.runtime.exported.run import Exported, GuardError


def _write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y[0] = x.sum()
    return x * y


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x
        return self.seen * x


@pytest.mark.parametrize("dialect", ["aten", "prims"])
def test_what_is_written_shares_no_memory(dialect: str) -> None:
    """The program was recorded with arguments apart from each other; together they would give other numbers."""
    exported = torchlazy.export(_write, (torch.randn(4), torch.randn(4)), dialect=dialect)
    whole = torch.randn(9)
    before = whole.clone()
    for x, y in ((whole[:4], whole[:4]), (whole[:4], whole[3:7]), (whole[1:5], whole[:8:2])):
        with pytest.raises(GuardError, match="argument x, which the program writes to, shares memory with argument y"):
            exported(x, y)
    assert torch.equal(whole, before)
    expected = before.clone()
    torch.testing.assert_close(exported(whole[:4], whole[4:8]), _write(expected[:4], expected[4:8]))
    torch.testing.assert_close(whole, expected)


def test_state_that_is_written_is_no_argument() -> None:
    exported = torchlazy.export(Counter(), (torch.ones(3),))
    with pytest.raises(GuardError, match="argument x shares memory with the buffer seen, and the program writes to"):
        exported(exported.state["seen"])
    exported(torch.ones(3))
    assert exported.state["seen"].tolist() == [1.0, 1.0, 1.0]


def test_arguments_that_are_only_read_may_share_memory() -> None:
    exported = torchlazy.export(lambda x, y: x * y, (torch.randn(4), torch.randn(4)))
    x = torch.randn(5)
    torch.testing.assert_close(exported(x[:4], x[1:]), x[:4] * x[1:])


def _exported() -> tuple[Exported, nn.Module]:
    layer = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    return torchlazy.export(layer, (torch.randn(2, 4),), dynamic={"input": {0: "n"}}), layer


def test_an_exported_program_is_exported_and_compiled_within_others() -> None:
    inner, layer = _exported()
    x = torch.randn(5, 4)
    outer = torchlazy.export(lambda x: inner(x) + 1, (torch.randn(2, 4),), dynamic={"x": {0: "n"}})
    torch.testing.assert_close(outer(x), layer(x).detach() + 1)
    compiled = torchlazy.compile(lambda x: inner(x) * 2)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), layer(x).detach() * 2)


def test_under_vmap() -> None:
    inner, layer = _exported()
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(torch.vmap(lambda one: inner(one))(x), layer(x).detach())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies(copied: Any) -> None:
    exported = torchlazy.export(Counter(), (torch.ones(3),))
    other = copied(exported)
    other(torch.ones(3))
    assert other.state["seen"].sum() == 3 and exported.state["seen"].sum() == 0


@pytest.mark.parametrize("asks", [torch.equal, torch.allclose])
def test_a_comparison_that_gives_a_bool_needs_a_value(asks: Any) -> None:
    with pytest.raises(ExportError, match=f"'{asks.__name__}' needs a value on the host"):
        torchlazy.export(lambda x: x if asks(x, x + 1) else x * 2, (torch.ones(3),))


def test_a_recurrent_layer_in_training() -> None:
    """How large oneDNN's workspace is follows no formula, and nobody reads it."""
    layer = nn.LSTM(4, 6, batch_first=True, bidirectional=True).train()
    exported = torchlazy.export(lambda x: layer(x)[0], (torch.randn(3, 5, 4),), dynamic={"x": {0: "batch"}})
    for batch in (3, 1, 7):
        x = torch.randn(batch, 5, 4)
        torch.testing.assert_close(exported(x), layer(x)[0].detach())


def test_primitives_in_torchs_own_form() -> None:
    """Positions that must not be negative, and sizes that are numbers of the program, stay symbolic there."""
    table, norm = nn.Embedding(9, 8), nn.GroupNorm(2, 8)

    def fn(ids: torch.Tensor) -> torch.Tensor:
        return norm(table(ids).transpose(1, 2))

    exported = torchlazy.export(
        fn, (torch.randint(0, 9, (2, 6)),), dynamic={"ids": {0: "batch", 1: "length"}}, dialect="prims"
    )
    module = exported.to_exported_program().module()
    for shape in ((2, 6), (3, 11)):
        ids = torch.randint(0, 9, shape)
        torch.testing.assert_close(module(ids), fn(ids).detach())
    with pytest.raises(IndexError):
        exported(torch.full((2, 6), -1))


def test_what_torchs_exporter_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no form for this")

    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(NotConvertible, match=r"AssertionError: no form for this\).*torchlazy.load"):
        torchlazy.export(lambda x: x + 1, (torch.ones(2),)).to_exported_program()


def test_a_device_that_there_is_none_of(tmp_path: Any) -> None:
    torchlazy.export(lambda x: x + 1, (torch.ones(2),)).save(tmp_path / "program.tlz")
    with pytest.raises(ValueError, match='device \'gpu\' is none; use "cpu", "cuda"'):
        torchlazy.load(tmp_path / "program.tlz", device="gpu")
