"""Exported programs on disk: what is read back, how little it takes to run it, and what a damaged file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.runtime.errors import ExportedFileError
from torchlazy.runtime.exported.file import decode, encode
from torchlazy.runtime.exported.run import ExportedRunError, GuardError
from torchlazy.runtime.exported.sizes import SizeExpr, add, evaluate, floordiv, mul, names_in, solve, symbol
from torchlazy.runtime.exported.tree import NotPlain, Record, differing, flatten_plain, unflatten_plain

MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 5)
    def forward(self, ids):
        return {"scores": self.out(torch.nn.functional.gelu(self.norm(self.embed(ids)))), "n": ids.shape[0]}
"""

# Runs in a process that can import neither the compiler, nor SymPy, nor the module that the model was defined in.
RUNNER = """
import sys

class Block:
    names = BLOCKED
    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.names):
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Block())
import torch, torchlazy
exported = torchlazy.load(sys.argv[1])
given = torch.load(sys.argv[2], weights_only=True)
result = exported(*given["args"])
torch.save({"scores": result["scores"], "n": result["n"]}, sys.argv[3])
before = set(sys.modules)
bad = ("torchlazy.inductor", "torchlazy.lazy.plan.pipeline", "torchlazy.lazy.run.driver", "net_of_the_test", *EXTRA)
for name in bad:
    assert name not in sys.modules, name
"""
BLOCKED = ("torchlazy.inductor", "torchlazy.autograd", "net_of_the_test", "transformers")


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    (tmp_path / "net_of_the_test.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net_of_the_test", raising=False)
    return __import__("net_of_the_test").Net()


def elsewhere(folder: Path, file: Path, args: tuple[Any, ...], sympy: bool) -> dict[str, Any]:
    """The program's result in a process of its own."""
    torch.save({"args": args}, folder / "args.pt")
    blocked = BLOCKED if sympy else (*BLOCKED, "sympy", "torchlazy.prims.ops", "torchlazy.prims.decompose")
    extra = () if sympy else ("sympy",)
    script = RUNNER.replace("BLOCKED", repr(blocked)).replace("EXTRA", repr(extra))
    command = [sys.executable, "-c", script, str(file), str(folder / "args.pt"), str(folder / "result.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder.parent, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize("dialect", ["aten", "prims"])
def test_runs_without_compiler_and_model_code(net: nn.Module, tmp_path: Path, dialect: str) -> None:
    exported = torchlazy.export(net, (torch.arange(4),), dynamic={"ids": {0: "n"}}, dialect=dialect)
    exported.save(tmp_path / "net.tlz")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    ids = torch.tensor([3, 19, 0, 7, 7, 1])
    result = elsewhere(folder, tmp_path / "net.tlz", (ids,), sympy=dialect == "prims")
    torch.testing.assert_close(result["scores"], net(ids)["scores"].detach())
    assert result["n"] == 6


def test_what_is_read_is_what_was_saved(net: nn.Module, tmp_path: Path) -> None:
    exported = torchlazy.export(net, (torch.arange(4),), dynamic={"ids": {0: "n"}})
    exported.save(tmp_path / "net.tlz")
    loaded = torchlazy.load(tmp_path / "net.tlz")
    assert loaded.graph == exported.graph
    assert list(loaded.state) == list(exported.state)
    for key, value in exported.state.items():
        assert torch.equal(loaded.state[key], value) and loaded.state[key].dtype == value.dtype
    assert loaded.guards == exported.guards and loaded.graph.text() == exported.graph.text()
    exported.save(tmp_path / "again.tlz")
    first, second = ((tmp_path / name).read_bytes() for name in ("net.tlz", "again.tlz"))
    with zipfile.ZipFile(tmp_path / "net.tlz") as a, zipfile.ZipFile(tmp_path / "again.tlz") as b:
        assert all(a.read(name) == b.read(name) for name in a.namelist())
    assert len(first) == len(second)
    assert b"pickle" not in first


def test_an_updated_state_is_saved(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(3)
    exported = torchlazy.export(norm, (torch.randn(4, 3),))
    for _ in range(2):
        exported(torch.randn(4, 3))
    exported.save(tmp_path / "norm.tlz")
    loaded = torchlazy.load(tmp_path / "norm.tlz")
    assert loaded.state["num_batches_tracked"] == 2
    torch.testing.assert_close(loaded.state["running_mean"], exported.state["running_mean"])
    exported(torch.randn(4, 3))
    assert loaded.state["num_batches_tracked"] == 2


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    held = torch.tensor([[1, 0, 3], [0, 5, 2]]).to(dtype)
    if dtype.is_complex:
        held = held * (1 + 2j)
    scalar, empty, transposed = held[0, 2].clone(), held[:0].clone(), held.t()

    def fn(x: torch.Tensor) -> Any:
        return held, scalar, empty, transposed, x + 1

    exported = torchlazy.export(fn, (torch.ones(2),))
    exported.save(tmp_path / "all.tlz")
    got = torchlazy.load(tmp_path / "all.tlz")(torch.ones(2))
    for a, b in zip(got, fn(torch.ones(2)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_strange_constants_of_a_graph(tmp_path: Path) -> None:
    def fn(x: torch.Tensor, limit: float) -> torch.Tensor:
        masked = x.masked_fill(x > 1, float("-inf")).clamp(min=-0.0, max=limit)
        return torch.where(masked.isnan(), torch.tensor(float("nan")), masked * complex(1, -0.0).real)

    exported = torchlazy.export(fn, (torch.randn(5), float("inf")))
    exported.save(tmp_path / "f.tlz")
    x = torch.randn(5)
    loaded = torchlazy.load(tmp_path / "f.tlz")
    torch.testing.assert_close(loaded(x, float("inf")), fn(x, float("inf")))
    with pytest.raises(GuardError, match=r"argument limit is 1\.0, it was inf"):
        loaded(x, 1.0)


def test_another_device_name(net: nn.Module, tmp_path: Path) -> None:
    exported = torchlazy.export(net, (torch.arange(4),))
    exported.save(tmp_path / "net.tlz")
    loaded = torchlazy.load(tmp_path / "net.tlz", device="cpu")
    torch.testing.assert_close(loaded(torch.arange(4))["scores"], exported(torch.arange(4))["scores"])
    meta = torchlazy.load(tmp_path / "net.tlz", device="meta")
    result = meta(torch.arange(4, device="meta"))
    assert result["scores"].shape == (4, 5) and result["scores"].device.type == "meta"
    with pytest.raises(GuardError, match="argument ids is on cpu, the program was exported for meta; move it"):
        meta(torch.arange(4))


# ---------------------------------------------------------------- damaged files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program.tlz"
    torchlazy.export(nn.Linear(3, 2), (torch.ones(1, 3),)).save(path)
    return path


@pytest.mark.parametrize("keep", [0, 10, 0.3, 0.7, 0.98])
def test_a_truncated_file(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    with pytest.raises(ExportedFileError, match=r"program.tlz is no exported program, or is cut off"):
        torchlazy.load(file)


def test_every_changed_byte_of_the_content_is_noticed(file: Path) -> None:
    content = file.read_bytes()
    reference = torchlazy.load(file)
    changed = 0
    for position in range(0, len(content), max(1, len(content) // 150)):
        damaged = bytearray(content)
        damaged[position] ^= 0x55
        file.write_bytes(damaged)
        try:
            loaded = torchlazy.load(file)
        except ExportedFileError:
            changed += 1
            continue
        # Bytes of the zip's own tables (times, modes) change nothing of the program.
        assert loaded.graph == reference.graph
        assert all(torch.equal(loaded.state[k], v) for k, v in reference.state.items())
    assert changed > 100


def rewritten(file: Path, change: Any) -> Path:
    """The file with its members changed by `change(members)`."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file


def with_manifest(**facts: Any) -> Any:
    def change(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps({**json.loads(members["manifest.json"]), **facts}).encode()

    return change


def with_graph(text: str, name: str = "graph.json") -> Any:
    """A member that is consistent with its hash, but is not what it should be."""
    import hashlib

    def change(members: dict[str, bytes]) -> None:
        members[name] = text.encode()
        hashes = {
            **json.loads(members["manifest.json"])["sha256"],
            name: hashlib.sha256(text.encode()).hexdigest(),
        }
        with_manifest(sha256=hashes)(members)

    return change


def without(name: str) -> Any:
    return lambda members: members.pop(name)


def altered(name: str) -> Any:
    return lambda members: members.update({name: members[name][:-1] + b"!"})


@pytest.mark.parametrize(
    "change, text",
    [
        (with_manifest(version=99), "has version 99 of the format, this torchlazy reads version 1"),
        (with_manifest(format="a zip of cats"), "its manifest names another format"),
        (without("manifest.json"), "has no manifest.json"),
        (without("tensors.bin"), "is incomplete: tensors.bin is missing"),
        (altered("graph.json"), "is damaged: graph.json is not what was saved"),
        (altered("tensors.bin"), "is damaged: tensors.bin is not what was saved"),
        (altered("tensors.json"), "is damaged: tensors.json is not what was saved"),
        (altered("manifest.json"), "is no exported program, or is cut off"),
        (with_graph('{"torch": "load"}'), "a graph or tensor in it is malformed"),
        (with_graph('{"os.system": ["true"]}'), "a graph or tensor in it is malformed"),
        (with_graph("3"), "graph.json holds a int"),
        (with_graph('{"ExportedGraph": {}}'), "a graph or tensor in it is malformed"),
        (with_graph("{}", "tensors.json"), "of which there is no value"),
    ],
)
def test_foreign_and_damaged_files(file: Path, change: Any, text: str) -> None:
    with pytest.raises(ExportedFileError) as caught:
        torchlazy.load(rewritten(file, change))
    assert text in str(caught.value) and str(file) in str(caught.value)


def test_files_of_another_kind(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "weights.pt")  # a zip too
    with pytest.raises(ExportedFileError, match=r"weights.pt is a zip file, but no exported program"):
        torchlazy.load(tmp_path / "weights.pt")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ExportedFileError, match="is no exported program"):
        torchlazy.load(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError):
        torchlazy.load(tmp_path / "nothing.tlz")


def test_a_save_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()
    exported = torchlazy.load(file)
    exported.state["weight"] = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        exported.save(file)
    assert file.read_bytes() == before and list(file.parent.glob("*.part")) == []


def test_a_graph_that_writes_is_refused(file: Path) -> None:
    def change(members: dict[str, bytes]) -> None:
        with_graph(members["graph.json"].decode().replace("aten.addmm.default", "aten.addmm.out"))(members)

    with pytest.raises(RuntimeError, match=r"aten\.addmm\.out writes to its arguments"):
        torchlazy.load(rewritten(file, change))


# ---------------------------------------------------------------- guards


def test_every_guard_names_its_argument() -> None:
    def fn(batch: Any, *, mask: torch.Tensor) -> torch.Tensor:
        return batch["x"].sum() + mask.sum()

    x, mask = torch.ones(2, 3), torch.ones(4)
    exported = torchlazy.export(fn, ({"x": x},), {"mask": mask})
    assert exported({"x": x}, mask=mask) == 10
    for args, kwargs, text in (
        (({"x": x.double()},), {"mask": mask}, "argument batch['x'] is torch.float64"),
        (({"x": x[0]},), {"mask": mask}, "argument batch['x'] has 1 dimensions, the program was exported for 2"),
        (({"x": x},), {"mask": torch.ones(5)}, "argument mask: dimension 0 is 5, it was 4"),
        (({"x": x},), {"mask": 3}, "argument mask is a int, it was a tensor"),
        (({"y": x},), {"mask": mask}, "argument batch has the keys ['y'], ['x'] at the export"),
        (({"x": x.to_sparse()},), {"mask": mask}, "argument batch['x'] is a torch.sparse_coo tensor"),
        (({"x": object()},), {"mask": mask}, "argument batch['x'] is a object"),
        (([x],), {"mask": mask}, "argument batch is a list, it was a dict"),
        (({"x": x},), {}, "missing a required"),
        (({"x": x}, 1), {"mask": mask}, "too many positional arguments"),
    ):
        with pytest.raises(GuardError) as caught:
            exported(*args, **kwargs)
        assert text in str(caught.value)


def test_the_default_dtype_is_a_guard() -> None:
    exported = torchlazy.export(lambda x: x / 2, (torch.arange(3),))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GuardError, match=r"call torch.set_default_dtype\(torch.float32\)"):
            exported(torch.arange(3))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_value_that_is_not_as_predicted_stops_the_run() -> None:
    exported = torchlazy.export(lambda x: x * 2, (torch.ones(4),), dynamic={"x": {0: "n"}})
    graph = exported.graph
    node = next(n for n in graph.nodes if n.op == "aten.mul.Tensor")
    wrong = torchlazy.runtime.exported.graph.Node(
        node.op, node.args, node.kwargs, node.outputs, (((add(symbol("n"), 1),), torch.float32),), node.frame
    )
    broken = torchlazy.runtime.exported.run.Exported(
        __import__("dataclasses").replace(graph, nodes=tuple(wrong if n is node else n for n in graph.nodes)), {}
    )
    with pytest.raises(
        ExportedRunError, match=r"aten.mul.Tensor gave torch.float32 of shape \[5\], the export predicted"
    ):
        broken(torch.ones(5))


# ---------------------------------------------------------------- parts


def test_sizes() -> None:
    n, m = symbol("n"), symbol("m")
    expr = add(mul(3, n), mul(n, add(m, -1)))
    assert evaluate(expr, {"n": 5, "m": 4}) == 30 and names_in(expr) == {"n", "m"}
    assert str(floordiv(add(n, 1), 2)) == "(n + 1)//2"
    assert (mul(0, n), mul(1, n), add(n, 0), floordiv(7, 2)) == (0, n, n, 3)
    assert solve(add(mul(4, n), 2), 14, {}) == ("n", 3)
    assert solve(expr, 30, {}) is None and solve(n, 4, {"n": 4}) is None
    with pytest.raises(ValueError):
        solve(mul(4, n), 14, {})
    assert evaluate(SizeExpr("truediv", (1.0, n)), {"n": 3}) == 1.0 / 3
    for value in (expr, (1, [2.5, None, "a"]), float("inf"), -0.0, 1 + 2j, torch.float16, torch.device("cpu")):
        assert decode(json.loads(json.dumps(encode(value)))) == value


def test_trees() -> None:
    value = {"a": [torch.ones(2), (1, None)], "b": Record(x=torch.zeros(1), y="s")}
    leaves, tree = flatten_plain(value, "v")
    assert [place for place, _ in leaves] == ["v['a'][0]", "v['b'].x"]
    again = unflatten_plain(tree, iter(t for _, t in leaves))
    assert again["a"][1] == (1, None) and again["b"].y == "s" and again["b"].x is leaves[1][1]
    assert differing(tree, tree, "v") == ""
    other = flatten_plain({"a": [torch.ones(2), (1, 2)], "b": Record(x=torch.zeros(1), y="s")})[1]
    assert differing(other, tree, "v") == "v['a'][1][1] is 2, it was None at the export"
    with pytest.raises(NotPlain, match="v\\[0\\] is a object"):
        flatten_plain([object()], "v")
    with pytest.raises(AttributeError):
        _ = again["b"].z
