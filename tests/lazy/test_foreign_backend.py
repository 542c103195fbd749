"""Back ends that are not ours, on traces that we recorded: results, donations, checks, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import fx
from torchlazy.lazy.api import driver
from torchlazy.lazy.run.foreign_backend import ForeignBackendError, compile_with, graph_module
from torchlazy.lazy.run.interpreter import run_entries
from torchlazy.lazy.run.straight_line import ByOperators
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.trace import CutTrace

pytestmark = pytest.mark.usefixtures("device_in_python")  # traces are caught where they are cut

Cut = tuple[CutTrace, list[torch.Tensor], list[Any]]


def forward(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


def dynamo(name: str) -> Callable[..., Any]:
    import torch._dynamo

    return torch._dynamo.lookup_backend(name)


def traces_of(program: Callable[[], object]) -> list[Cut]:
    """Every cut of `program`: its trace, copies of its inputs' memory, its scalars."""
    seen: list[Cut] = []

    def spy(_: ByOperators, trace: CutTrace, inputs: Any, scalars: Any) -> Any:
        seen.append((trace, [v.clone() for v in inputs], list(scalars)))
        return run_entries(trace, inputs, scalars)

    before = ByOperators.run
    ByOperators.run = spy  # type: ignore[method-assign]
    driver.forget()
    try:
        program()
        torchlazy.sync()
    finally:
        ByOperators.run = before  # type: ignore[method-assign]
    return seen


def copies(cut: Cut) -> Cut:
    trace, inputs, scalars = cut
    return trace, [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v) for v in inputs], scalars


def agree(cut: Cut, backend: Callable[..., Any], **tolerance: float) -> None:
    """The back end's results equal those of tier 0, in layout too, and lie where the trace says."""
    trace, inputs, scalars = copies(cut)
    _, ours, _ = copies(cut)
    want = run_entries(trace, inputs, scalars)
    donated = {out: ours[given] for out, given in trace.donations}
    given = set(v.data_ptr() for v in ours if v.numel())
    kept = list(ours)
    program = compile_with(backend, trace)
    got = program.run(ours, scalars)
    assert ours == [] and len(got) == len(want)
    for position, (a, b, (_, geom)) in enumerate(zip(got, want, trace.outputs, strict=True)):
        assert isinstance(b, torch.Tensor)
        torch.testing.assert_close(a, b, **tolerance)
        assert a.stride() == b.stride() == geom.strides and a.dtype == b.dtype
        if position in donated:
            assert a.data_ptr() == donated[position].data_ptr()
        elif a.numel():
            assert a.data_ptr() not in given
    del kept


def pointwise() -> None:
    x = torch.arange(12.0, device="lazy").reshape(3, 4)
    _kept.append(((x * 2).relu().t(), x.sum(0), x[1:]))


def in_place() -> None:
    x = torch.ones(5, device="lazy")
    torchlazy.sync()
    y = x.exp()
    x.mul_(3).add_(1)
    _kept.append((x, y, x[2:4].fill_(7)))


def train_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(4, 6, device="lazy")
    torchlazy.sync()
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _kept.append((model, optimizer))


def batch_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).to("lazy")
    x = torch.randn(2, 2, 8, 8, device="lazy")
    torchlazy.sync()
    _kept.append((model, model(x)))


_kept: list[object] = []  # what a program holds at its cut is what its trace returns
PROGRAMS = [pointwise, in_place, train_step, batch_norm]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("backend", ["forward", "eager", "aot_eager", "inductor"])
def test_results_are_those_of_tier_0(program: Callable[[], object], backend: str) -> None:
    cuts = traces_of(program)
    assert cuts
    for cut in cuts:
        agree(cut, forward if backend == "forward" else dynamo(backend), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_graph_runs_as_it_is(program: Callable[[], object]) -> None:
    for cut in traces_of(program):
        trace, inputs, scalars = copies(cut)
        module = graph_module(trace)
        module.graph.lint()
        with torch.no_grad():
            got = module(*[v.clone() for v in inputs], *scalars)
        for a, b in zip(got, run_entries(trace, inputs, scalars), strict=True):
            torch.testing.assert_close(a, b)
        tensors = [n for n in module.graph.nodes if n.op == "placeholder" and str(n.target).startswith("in")]
        assert [tuple(n.meta["tensor_meta"].shape) for n in tensors] == [geom.shape for _, geom in trace.inputs]


def dropout() -> None:
    x = torch.ones(64, device="lazy")
    torchlazy.sync()
    _kept.append(torch.nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("backend", ["forward", "aot_eager", "inductor"])
def test_seeds_are_not_baked_in(backend: str) -> None:
    trace, inputs, scalars = traces_of(dropout)[-1]
    program = compile_with(forward if backend == "forward" else dynamo(backend), trace)
    (first,) = program.run([v.clone() for v in inputs], scalars)
    (second,) = program.run([v.clone() for v in inputs], [s + 1 for s in scalars])
    assert program.calls == 1
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, run_entries(trace, [v.clone() for v in inputs], [s + 1 for s in scalars])[0])


def scaled() -> None:
    x = torch.ones(4, device="lazy")
    y = torch.arange(4.0, device="lazy")
    torchlazy.sync()
    _kept.append((x * 0.5, torch.add(x, y, alpha=0.25), x.half().mul(0.1), torch.addcmul(x, x, y, value=0.3)))


@pytest.mark.parametrize("backend", ["forward", "aot_eager"])
def test_numbers_vary(backend: str) -> None:
    trace, inputs, scalars = traces_of(scaled)[-1]
    assert len(scalars) == 4
    program = compile_with(forward if backend == "forward" else dynamo(backend), trace)
    for step in range(12):
        values = [s + step for s in scalars]
        got = program.run([v.clone() for v in inputs], values)
        for a, b in zip(got, run_entries(trace, [v.clone() for v in inputs], values), strict=True):
            torch.testing.assert_close(a, b)
    assert program.calls == 8  # addcmul takes its number as a number: asked once a value, then as it is


def test_a_back_end_that_counts() -> None:
    graphs: list[list[str]] = []

    def counting(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        assert all(isinstance(i, torch.Tensor) for i in inputs)
        return gm

    cut = traces_of(in_place)[-1]
    agree(cut, counting)
    assert len(graphs) == 1 and "aten.exp.default" in graphs[0]


def test_compiles_below_autograd() -> None:
    """Programs are compiled and run there; a back end that traces must not notice."""
    trace, inputs, scalars = traces_of(in_place)[-1]
    want = run_entries(trace, [v.clone() for v in inputs], scalars)
    with below_autograd():
        got = compile_with(dynamo("inductor"), trace).run([v.clone() for v in inputs], scalars)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def refusing(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    raise ValueError("no such graph")


def refuses_to_run(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        raise ZeroDivisionError("while running")

    return run


def changed(change: Callable[[list[torch.Tensor]], Any]) -> Callable[..., Any]:
    return lambda gm, inputs: lambda *args: change(list(gm(*args)))


@pytest.mark.parametrize(
    "backend, text",
    [
        (refusing, "raised ValueError while it compiled: no such graph"),
        (refuses_to_run, "raised ZeroDivisionError while it ran"),
        (lambda gm, inputs: None, "returned a NoneType, not a callable"),
        (changed(lambda out: out[:-1]), "returned 1 values, the graph has 2 outputs"),
        (changed(lambda out: 3), "returned int"),
        (changed(lambda out: [out[0], out[1].sum()]), "output 1 of its callable is torch.float32 of shape ()"),
        (changed(lambda out: [out[0].double(), out[1]]), "output 0 of its callable is torch.float64"),
        (changed(lambda out: [out[0], 1.5]), "output 1 of its callable is a float"),
    ],
)
def test_broken_back_ends_are_told(backend: Callable[..., Any], text: str) -> None:
    trace, inputs, scalars = traces_of(in_place)[-1]
    with pytest.raises(ForeignBackendError) as caught:
        compile_with(backend, trace).run(inputs, scalars)
    assert text in str(caught.value)


def test_strange_layouts_are_brought_into_order() -> None:
    """Every output as a window on larger memory, with strides of its own."""
    trace, inputs, scalars = traces_of(pointwise)[-1]
    want = run_entries(trace, [v.clone() for v in inputs], scalars)

    def strange(out: list[torch.Tensor]) -> Any:
        return [torch.stack([value, value], -1)[..., 0] for value in out]

    got = compile_with(changed(strange), trace).run([v.clone() for v in inputs], scalars)
    for a, b, (_, geom) in zip(got, want, trace.outputs, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == geom.strides and a.untyped_storage().nbytes() == geom.nbytes


@pytest.mark.parametrize("backend", ["forward", "aot_eager"])
@pytest.mark.parametrize("where", ["lazy", "native", "cpu"])
def test_under_torchlazy_compile(backend: str, where: str) -> None:
    """A whole training step: the programs are the back end's, the results eager's."""
    if where == "native":
        torchlazy.config.native_device, where = "on", "lazy"
    graphs: list[int] = []
    inner = forward if backend == "forward" else dynamo(backend)

    def counting(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(len(gm.graph.nodes))
        return inner(gm, inputs)

    def losses(device: str, compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = torchlazy.compile(step, backend=counting) if compiled else step
        x, y = torch.randn(16, 8).to(device), torch.randn(16, 2).to(device)
        return [call(x, y).item() for _ in range(6)]

    torch.testing.assert_close(losses(where, True), losses("cpu", False), rtol=1e-4, atol=1e-5)
    assert graphs


_MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)),
    "lstm": lambda: torch.nn.LSTM(3, 3),
    "batch norm": lambda: torch.nn.BatchNorm1d(3),
    "gradients of gradients": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()),
}


@pytest.mark.parametrize("backend", ["forward", "aot_eager"])
@pytest.mark.parametrize("what", _MODELS)
def test_results_that_need_gradients(what: str, backend: str) -> None:
    """A compiled module, trained from outside: the back end compiles its forward and its backward."""
    graphs: list[set[str]] = []
    inner = forward if backend == "forward" else dynamo(backend)

    def counting(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append({str(node.target) for node in gm.graph.nodes})
        assert all(isinstance(value, torch.Tensor) for value in inputs)
        return inner(gm, inputs)

    def train(is_compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = _MODELS[what]()
        call = torchlazy.compile(model, backend=counting) if is_compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for turn in range(8):
            x = torch.sin(torch.arange(12.0).reshape(4, 3) + turn).requires_grad_()
            y = call(x[None])[0] if what == "lstm" else call(x)
            loss = y.square().mean()
            if "of gradients" in what:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert x.grad is not None
            found += [loss.item(), x.grad.sum().item()]
        return found

    assert train(True) == pytest.approx(train(False), rel=1e-4, abs=1e-6)
    assert len(graphs) >= (3 if "of gradients" in what else 2)
    assert all(any(target.startswith("aten.") for target in found) for found in graphs)


def test_a_broken_back_end_is_told_where_gradients_are_needed() -> None:
    call = torchlazy.compile(torch.nn.Linear(3, 4), backend=refusing)
    with pytest.raises(ForeignBackendError, match="no such graph"):
        for _ in range(4):
            call(torch.randn(2, 3))
