"""Who runs what `torchlazy.export` gives: torch in a process without this package, `torchlazy.load`, `torch.compile`,
AOTInductor; training steps among the programs; files that `torchlazy.load` refuses.

Invariant: each of them gives what the model gives, and leaves the state that the model leaves.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


class Step(nn.Module):
    """A training step as a program: forward, backward, SGD with momentum, and what batch norm writes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.momentum = nn.ParameterList(torch.zeros_like(p) for p in self.model.parameters()).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            loss = F.mse_loss(self.model(x), y)
            gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, momentum, gradient in zip(self.model.parameters(), self.momentum, gradients, strict=True):
                momentum.mul_(0.9).add_(gradient)
                parameter.sub_(momentum, alpha=0.1)
            self.steps += 1
        return loss.detach()


@pytest.fixture
def step() -> Step:
    torch.manual_seed(0)
    return Step().train()


@pytest.fixture
def saved(step: Step, tmp_path: Path) -> Path:
    program = torchlazy.export(step, (torch.randn(6, 4), torch.randn(6, 2)), dynamic={"x": {0: "n"}, "y": {0: "n"}})
    assert set(program.run_decompositions().graph_signature.buffers_to_mutate.values()) == set(step.state_dict())
    torch.export.save(program, tmp_path / "step.pt2")
    return tmp_path / "step.pt2"


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


def trains_like(module: nn.Module, run: Callable[..., Any], step: Step, *sizes: int) -> None:
    """The losses of a few steps and the state after each."""
    for x, y in batches(*sizes):
        torch.testing.assert_close(run(x, y), step(x, y))
        for key, value in step.state_dict().items():
            torch.testing.assert_close(module.state_dict()[key], value)


ALONE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchlazy", "tests"):
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Block())
import torch
module = torch.export.load(sys.argv[1]).module()
losses = [module(x, y) for x, y in torch.load(sys.argv[2], weights_only=True)]
torch.save({"losses": losses, "state": module.state_dict()}, sys.argv[3])
"""


def test_a_training_step_in_a_process_of_torch_alone(saved: Path, step: Step, tmp_path: Path) -> None:
    given = batches(6, 9, 3)
    torch.save(given, tmp_path / "given.pt")
    files = [str(saved), str(tmp_path / "given.pt"), str(tmp_path / "result.pt")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # this package is installed here, and torch would import it
    command = [sys.executable, "-c", ALONE, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    for (x, y), loss in zip(given, result["losses"], strict=True):
        torch.testing.assert_close(loss, step(x, y))
    for key, value in step.state_dict().items():
        torch.testing.assert_close(result["state"][key], value.detach())


def test_a_training_step_by_our_kernels(saved: Path, step: Step) -> None:
    loaded = torchlazy.load(saved)
    trains_like(loaded, loaded, step, 6, 6, 6, 6, 9, 9, 6, 4)
    torchlazy.wait_for_compile()
    trains_like(loaded, loaded, step, 6, 6, 9)
    report = str(loaded.report())
    assert "not replayed" not in report and " 0 ran their Python" in report, report


def test_a_program_that_torch_exported_is_run_by_our_kernels(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU()).train()
    before = copy.deepcopy(model)
    names = ({0: torch.export.Dim("batch", min=2)},)
    torch.export.save(torch.export.export(model, (torch.randn(6, 4),), dynamic_shapes=names), tmp_path / "torch.pt2")
    loaded = torchlazy.load(tmp_path / "torch.pt2")
    for n in (6, 6, 6, 8, 6):
        x = torch.randn(n, 4)
        torch.testing.assert_close(loaded(x), before(x))
        torch.testing.assert_close(dict(loaded.named_buffers())["1.running_mean"], before[1].running_mean)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")),
    ],
)
def test_torch_compiles_a_training_step(backend: str, saved: Path, step: Step) -> None:
    module = torch.export.load(saved).module()
    with torch.no_grad():
        trains_like(module, torch.compile(module, backend=backend), step, 6, 9, 3)


@pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")
def test_aot_inductor_compiles_a_training_step(step: Step, tmp_path: Path) -> None:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    size = torch.export.Dim("n", min=2, max=64)
    dynamic = {"x": {0: size}, "y": {0: size}}
    program = torchlazy.export(step, (torch.randn(6, 4), torch.randn(6, 2)), dynamic=dynamic)
    package = aoti_load_package(aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2")))
    for x, y in batches(6, 9, 3, 6):  # each loss is of the parameters that the step before has written
        torch.testing.assert_close(package(x, y), step(x, y))


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    held = torch.tensor([[1, 0, 3], [0, 5, 2]]).to(dtype)
    scalar, empty, transposed = held[0, 2].clone(), held[:0].clone(), held.t()

    def fn(x: torch.Tensor) -> Any:
        return held, scalar, empty, transposed, x.masked_fill(x > 1, float("-inf")).clamp(max=float("inf"))

    torch.export.save(torchlazy.export(fn, (torch.ones(2),)), tmp_path / "all.pt2")
    for got, want in zip(torchlazy.load(tmp_path / "all.pt2")(torch.ones(2)), fn(torch.ones(2)), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


def test_another_device(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(3, device=x.device)

    torch.export.save(torchlazy.export(fn, (torch.ones(3),)), tmp_path / "fn.pt2")
    assert torchlazy.load(tmp_path / "fn.pt2", device="cpu")(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
    moved = torchlazy.load(tmp_path / "fn.pt2", device="meta")(torch.ones(3, device="meta"))
    assert moved.shape == (3,) and moved.device.type == "meta"
    with pytest.raises(ValueError, match='device \'gpu\' is none; use "cpu", "cuda"'):
        torchlazy.load(tmp_path / "fn.pt2", device="gpu")


def test_an_operator_of_another_library_is_registered_before(tmp_path: Path) -> None:
    library = torch.library.Library("torchlazy_test_export", "DEF")
    library.define("scaled(Tensor x, float by) -> Tensor")
    library.impl("scaled", lambda x, by: x * by, "CompositeExplicitAutograd")
    library.impl("scaled", lambda x, by: torch.empty_like(x), "Meta")
    call = torch.ops.torchlazy_test_export.scaled
    program = torchlazy.export(lambda x: call(x, 2.0) + 1, (torch.ones(3),), dynamic={"x": {0: "n"}})
    torch.export.save(program, tmp_path / "scaled.pt2")
    assert torchlazy.load(tmp_path / "scaled.pt2")(torch.ones(2)).tolist() == [3.0, 3.0]
    script = "import sys, torchlazy; torchlazy.load(sys.argv[1])"
    command = [sys.executable, "-c", script, str(tmp_path / "scaled.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode and "import the library of a custom operator first" in done.stderr


def test_files_that_are_no_programs(tmp_path: Path, saved: Path) -> None:
    with zipfile.ZipFile(tmp_path / "old.tlz", "w") as archive:
        for name in ("manifest.json", "graph.json", "tensors.json", "tensors.bin"):
            archive.writestr(name, "{}")
    with pytest.raises(
        torchlazy.ExportedFileError, match=r"an earlier torchlazy[\s\S]*torch.export.save\(torchlazy.exp"
    ):
        torchlazy.load(tmp_path / "old.tlz")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(torchlazy.ExportedFileError, match="is no exported program, or is cut off"):
        torchlazy.load(tmp_path / "notes.txt")
    saved.write_bytes(saved.read_bytes()[:2000])
    with pytest.raises(torchlazy.ExportedFileError, match="is no exported program, or is cut off"):
        torchlazy.load(saved)
    torch.save({"a": 1}, tmp_path / "weights.pt")  # a zip too
    with pytest.raises(torchlazy.ExportedFileError, match=r"torch\.export\.load cannot read it"):
        torchlazy.load(tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError):
        torchlazy.load(tmp_path / "nothing.pt2")
