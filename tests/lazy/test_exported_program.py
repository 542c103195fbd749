"""What `torchlazy.export` gives: the function's own arguments and results, its state by name, in torch's own files.

Invariant: the program gives what the function gives, before and after `torch.export.save` and `load`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
from typing import Any, NamedTuple

import pytest
import torch
import torchlazy
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Model(nn.Module):
    """Every kind of argument, a tied parameter, buffers that are read and updated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
        self.tied = self.linear
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("fixed", torch.arange(3.0), persistent=False)

    def forward(self, batch, *rest, scale=2.0, extra=None, flag=True, **more):
        y = self.tied(self.linear(batch["x"])[..., :1].expand(-1, 4)) * scale + self.weight + self.fixed
        self.mean.add_(y.detach().mean(0))
        y = y + extra["add"][0] if flag else y
        for term in rest:
            y = y + term
        for factor in more.values():
            y = y * factor
        return {"y": y, "rest": [y.sum(), (y > 0, batch["ids"] + 1)], "n": 3, "none": None}


def call(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = {"x": torch.randn(rows, 4), "ids": torch.arange(rows), "list": [torch.ones(2)]}
    return (batch, torch.ones(3), torch.full((1,), 2.0)), {
        "extra": {"add": (torch.randn(rows, 1), 7)}, "flag": True, "gain": torch.tensor(2.0), "bias": torch.ones(3)
    }  # fmt: skip


def again(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Through torch's own file format."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def test_a_nested_call_with_keywords_and_state() -> None:
    model = Model()
    before = copy.deepcopy(model)
    args, kwargs = call(5)
    varies = {"batch": {"x": {0: "rows"}, "ids": {0: "rows"}}, "extra": {"add": [{0: "rows"}, None]}}
    program = torchlazy.export(model, args, kwargs, dynamic=varies)
    assert set(dict(program.named_parameters())) == {"linear.weight", "linear.bias", "weight"}
    assert set(dict(program.named_buffers())) == {"mean", "fixed"}
    for module in (program.module(), again(program).module()):
        plain = copy.deepcopy(before)
        for rows in (5, 2, 9):
            args, kwargs = call(rows)
            got, want = module(*args, **kwargs), plain(*args, **kwargs)
            assert list(got) == list(want) and got["n"] == 3 and got["none"] is None
            assert type(got["rest"]) is list and type(got["rest"][1]) is tuple
            torch.testing.assert_close(got["y"], want["y"].detach())
            torch.testing.assert_close(got["rest"][0], want["rest"][0].detach())
            assert all(map(torch.equal, got["rest"][1], want["rest"][1]))
            torch.testing.assert_close(dict(module.named_buffers())["mean"], plain.mean)
    assert list(program.run_decompositions().graph_signature.buffers_to_mutate.values()) == ["mean"]


def test_what_was_constant_stays_constant() -> None:
    args, kwargs = call(5)
    module = torchlazy.export(Model(), args, kwargs).module()
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        module(*args, **(kwargs | {"flag": False}))


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@dataclasses.dataclass
class Box:
    inner: torch.Tensor
    more: list[torch.Tensor]


def test_classes_of_the_program_become_plain_containers() -> None:
    def function(pair: Pair, box: Box) -> Any:
        return Pair(pair.a + box.inner, pair.b), Box(box.inner * 2, [pair.a]), collections.OrderedDict(z=pair.a - 1)

    pair, box = Pair(torch.ones(2), 3), Box(torch.ones(2) * 2, [])
    program = torchlazy.export(function, (pair, box))
    for module in (program.module(), again(program).module()):
        found = module((torch.ones(2), 3), {"inner": torch.ones(2) * 2, "more": []})
        assert [type(part) for part in found] == [tuple, dict, collections.OrderedDict]
        assert torch.equal(found[0][0], torch.full((2,), 3.0)) and found[0][1] == 3
        assert torch.equal(found[1]["inner"], torch.full((2,), 4.0)) and torch.equal(found[1]["more"][0], torch.ones(2))


def test_arguments_that_are_written_to_and_results_that_share_memory() -> None:
    def function(x: torch.Tensor, *, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out.copy_(x * 2)
        return out, x.t(), x.t()[0]

    x, out = torch.randn(3, 2), torch.zeros(3, 2)
    program = torchlazy.export(function, (x,), {"out": out})
    assert torch.equal(out, torch.zeros(3, 2))  # an export runs nothing
    for module in (program.module(), again(program).module()):
        into = torch.zeros(3, 2)
        found = module(x, out=into)
        assert torch.equal(into, x * 2) and torch.equal(found[0], x * 2) and torch.equal(found[1], x.t())


def test_sizes_that_go_in_steps_and_numbers_made_of_them() -> None:
    def function(xs: list[torch.Tensor]) -> dict[str, Any]:
        return {"folded": xs[0].reshape(2, -1).sum(1), "size": xs[0].shape[0] * 3, "mean": xs[0].mean()}

    exported = torchlazy.export(function, ([torch.randn(6)],), dynamic={"xs": [{0: "2*n"}]})
    module = exported.module()
    for size in (6, 10, 24):
        x = torch.randn(size)
        found, want = module([x]), function([x])
        torch.testing.assert_close(found["folded"], want["folded"])
        torch.testing.assert_close(found["mean"], want["mean"])
        assert found["size"] == want["size"]


def test_nodes_name_the_users_lines() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    program = torchlazy.export(function, (torch.ones(2),))
    for one in (program, again(program)):
        lines = [node.meta["stack_trace"] for node in one.graph.nodes if "sin" in node.name or "mul" in node.name]
        assert len(lines) == 2
        assert all(f'test_exported_program.py", line {function.__code__.co_firstlineno + 1}' in line for line in lines)


def test_an_argument_in_another_layout_is_brought_into_order() -> None:
    """A library's own view counts on the example's strides."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 2), (1, 3), 1) + x.view(-1)[0]

    module = torchlazy.export(function, (torch.randn(3, 4),)).module()
    x = torch.randn(4, 3).t()
    assert torch.equal(module(x), function(x.contiguous()))


def test_what_the_tracer_would_not_see_is_asserted() -> None:
    """A cast that the example made needless is not in the graph; nor is the dtype that `/` gives whole numbers."""
    module = torchlazy.export(lambda x: x.float() * 2, (torch.ones(2),)).module()
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        module(torch.ones(2, dtype=torch.float64))
    module = torchlazy.export(lambda x: x / 2, (torch.arange(3),)).module()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match="dtype mismatch"):
            module(torch.arange(3))
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_torchs_exporter_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no form for this")

    monkeypatch.setattr(torch.export, "export", refuse)
    for dynamic in (None, {"x": {0: "n"}}):
        with pytest.raises(torchlazy.ExportError, match=r"AssertionError: no form for this\)[\s\S]*remedy"):
            torchlazy.export(lambda x: x + 1, (torch.ones(2),), dynamic=dynamic)
