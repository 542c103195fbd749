"""What `torchlazy.export` promises of its files: no pickle, no compiler, none of the model's code, any call."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

Pair = namedtuple("Pair", "left right")


class Model(nn.Module):
    """A tied weight, a buffer that is written, containers in and out, keyword arguments, dropout-free."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor, *, more: dict[str, Any], scale: float = 1.0) -> Any:
        self.calls += 1
        hidden = self.norm(self.embed(tokens).mean(1) + more["add"][0]) * scale
        return {"logits": self.head(hidden), "rest": [Pair(hidden, more["add"][1] * 2), (self.calls.clone(), None)]}


def arguments(rows: int, seed: int = 0) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (rows, 5), generator=generator)
    more = {"add": (torch.randn(rows, 8, generator=generator), torch.randn(3, generator=generator))}
    return (tokens,), {"more": more, "scale": 2.0}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, Path]:
    torch.manual_seed(0)
    model = Model()
    args, kwargs = arguments(4)
    dynamic = {"tokens": {0: "rows"}, "more": {"add": ({0: "rows"}, None)}}
    torchlazy.export(model, args, kwargs, dynamic=dynamic).save(tmp_path / "model.tlz")
    return model, tmp_path / "model.tlz"


def flat(value: Any) -> list[Any]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if v is not None]


def test_loaded_programs_take_and_give_what_the_model_does(saved: tuple[Model, Path]) -> None:
    model, path = saved
    loaded = torchlazy.load(path)
    for turn, rows in enumerate((4, 6, 9)):
        args, kwargs = arguments(rows, turn)
        got, want = loaded(*args, **kwargs), model(*args, **kwargs)
        torch.testing.assert_close(flat(got), flat(want))
        assert got["rest"][0].left.shape == (rows, 8) and got["rest"][1][1] is None
    assert int(model.calls) == 3 == int(loaded.state["calls"])  # written buffers go on, each its own
    torch.testing.assert_close(loaded.state["norm.running_mean"], model.norm.running_mean)
    assert sum(name.endswith("weight") for name in loaded.state) == 2  # the tied one is there once


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, k: (a, {**k, "scale": 3.0}), "scale"),
        (lambda a, k: ((a[0].int(),), k), "int32"),
        (lambda a, k: (a, {**k, "more": {"add": (k["more"]["add"][0][:2], k["more"]["add"][1])}}), "rows"),
        (lambda a, k: ((a[0][:, :3],), k), "5"),
        (lambda a, k: (a, {**k, "other": 1}), "other"),
    ],
    ids=["number", "dtype", "equal sizes", "fixed size", "name"],
)
def test_a_call_that_the_graph_was_not_made_for_is_told(
    saved: tuple[Model, Path], change: Callable[..., Any], text: str
) -> None:
    args, kwargs = change(*arguments(4))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
        torchlazy.load(saved[1])(*args, **kwargs)


def test_no_pickle_is_written_or_read(saved: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = saved

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was called")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    args, kwargs = arguments(4)
    loaded = torchlazy.load(path)
    loaded.save(path.with_name("again.tlz"))
    torchlazy.load(path.with_name("again.tlz"))(*args, **kwargs)
    for file in (path, path.with_name("again.tlz")):
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        assert set(members) == {"manifest.json", "graph.json", "tensors.json", "tensors.bin"}
        for name, content in members.items():
            if name.endswith(".json"):
                json.loads(content)
            else:  # raw bytes of tensors
                assert len(content) >= sum(t.numel() * t.element_size() for t in loaded.state.values())
            with pytest.raises(ValueError):
                list(pickletools.genops(io.BytesIO(content)))


LOADER = """
import sys, torch, torchlazy
loaded = torchlazy.load(sys.argv[1])
tokens, more = torch.arange(30).view(6, 5) % 11, {"add": (torch.linspace(-1, 1, 48).view(6, 8), torch.ones(3))}
out = loaded(tokens, more=more, scale=2.0)
print(float(out["logits"].sum()), int(loaded.state["calls"]))
bad = ("torchlazy.inductor.lowering", "torchlazy.inductor.scheduler", "torchlazy.inductor.emit", "torchlazy.autograd",
       "torchlazy.prims.decompose", "torchlazy.lazy.plan.pipeline", "torchlazy.lazy.export.export",
       "torchlazy.lazy.export.record", "torchlazy.lazy.joint.record", "sympy", "triton", "numba",
       "torch._dynamo", "torch._inductor", "tests")
found = [m for m in sys.modules if any(m == b or m.startswith(b + ".") for b in bad)]
assert not found, found
"""


def test_the_loader_imports_neither_the_compiler_nor_the_models_code(saved: tuple[Model, Path]) -> None:
    model, path = saved
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(path)], capture_output=True, text=True, timeout=600, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    # Rows differ: a batch norm of equal ones shows how each sum was rounded.
    tokens, more = torch.arange(30).view(6, 5) % 11, {"add": (torch.linspace(-1, 1, 48).view(6, 8), torch.ones(3))}
    out = model(tokens, more=more, scale=2.0)
    total, calls = done.stdout.split()
    assert float(total) == pytest.approx(float(out["logits"].sum().detach()), rel=1e-4, abs=1e-3) and int(calls) == 1


def test_a_program_of_torch_runs_and_equals(saved: tuple[Model, Path]) -> None:
    model, path = saved
    program = torchlazy.load(path).to_exported_program().module()
    args, kwargs = arguments(7, 3)
    got = program(*args, **kwargs)  # as the function is called
    torch.testing.assert_close(flat(got), flat(model(*args, **kwargs)))


def test_random_numbers_at_once_are_no_constants() -> None:
    torchlazy.config.rng = "eager"
    with pytest.raises(RuntimeError, match=r"bernoulli_.*draws its numbers at once[\s\S]*test_export_promises"):
        torchlazy.export(lambda x: F.dropout(x, 0.5), (torch.ones(4),))
