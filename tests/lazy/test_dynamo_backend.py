"""`torch.compile(backend="torchlazy")`: what torch's capture hands over gives eager's results, writes and gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.dynamo.backend import GraphCall, torchlazy_backend
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from tests.fuzz.ways import followed

Function = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("fresh_capture")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphCall]:
    """Every graph that the backend was given."""
    made: list[GraphCall] = []
    original = GraphCall.__init__

    def init(self: GraphCall, *args: Any) -> None:
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(GraphCall, "__init__", init)
    return made


def compiled(fn: Any, **settings: Any) -> Any:
    return torch.compile(fn, backend="torchlazy", **settings)


def same(fn: Function, make: Callable[[], tuple[Any, ...]], **settings: Any) -> None:
    """Results, written inputs and gradients of three calls equal eager's."""
    program = compiled(fn, **settings)
    for seed in range(3):
        torch.manual_seed(seed)
        mine = make()
        theirs = copy.deepcopy(mine)
        got, want = program(*mine), fn(*theirs)
        assert_same(got, want)
        assert_same(mine, theirs)
        backward(got)
        backward(want)
        for a, b in zip(tensors(mine), tensors(theirs), strict=True):
            if a.is_leaf:
                assert_same(a.grad, b.grad)


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def assert_same(a: Any, b: Any) -> None:
    mine, theirs = tensors(a), tensors(b)
    assert len(mine) == len(theirs)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y)
        assert (x.stride(), x.requires_grad, type(x)) == (y.stride(), y.requires_grad, type(y))


def backward(value: Any) -> None:
    loss = sum(t.square().sum() for t in tensors(value) if t.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()


# ---------------------------------------------------------------- functions


def pointwise(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"a": (x + y).relu(), "b": [x.sum(), 3, None]}


def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ y.t(), -1)


def view_of_input(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.view(-1)[3:], x.t(), x, y * 2


def views_of_one_value(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * y
    return z[0], z[1:], z


def writes_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.add_(1)
        y[0] = 5
    return x * y


def factories(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(x.shape[1]) + torch.full_like(x, 2).cumsum(0) + torch.tensor([1.0]) + len(y)


def half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, y).float()


def own_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.detach() * y + x


def no_gradient_inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (x * y).sum()
    return x * scale


def two_paths(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.sin(), (y.detach() * 2).long(), y.cos() * x


FUNCTIONS = [
    pointwise, products, view_of_input, views_of_one_value, writes_input, factories, half, own_gradient,
    no_gradient_inside, two_paths,
]  # fmt: skip


@pytest.mark.parametrize("grad", ["none", "first", "both"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(fn: Function, grad: str, tier: str, graphs: list[GraphCall]) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        return x.requires_grad_(grad != "none"), y.requires_grad_(grad == "both")

    if fn is writes_input and grad == "both":
        make_both = make

        def make() -> tuple[torch.Tensor, ...]:  # a leaf changed under no_grad, as optimizers do
            return make_both()

    same(fn, make, fullgraph=True)
    assert len(graphs) >= 1 and all(graph.kinds and not graph.why_eager for graph in graphs)


def test_views_of_inputs_are_views(graphs: list[GraphCall]) -> None:
    program = compiled(lambda x: (x[1:], x.t(), x * 2))
    x = torch.randn(3, 4)
    tail, turned, _ = program(x)
    x.zero_()
    assert tail.abs().sum() == 0 and turned.abs().sum() == 0
    tail.add_(1)
    assert x[1:].sum() == 8


def test_views_of_one_value_share_memory() -> None:
    program = compiled(views_of_one_value)
    x, y = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4)
    first, rest, whole = program(x, y)
    with torch.no_grad():
        whole.zero_()
    assert first.sum() == 0 and rest.sum() == 0


def test_writes_under_autograd(tier: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(w)
        return (x + 1).sum()

    program = compiled(fn)
    for make_input in (lambda w: torch.ones(3), lambda w: w * 2):  # without a gradient before, and with one
        gradients = []
        for call in (program, fn):
            w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            x = make_input(w)
            result = call(x, w)
            (result + (x * x).sum()).backward()
            gradients.append((w.grad, x.detach().clone(), result.detach()))
        assert_same(*gradients)


def test_inputs_that_share_memory(graphs: list[GraphCall]) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    program = compiled(fn)
    for shift in (0, 1, 2):
        mine, theirs = torch.arange(6.0), torch.arange(6.0)
        got = program(mine[:4], mine[shift : shift + 4])
        want = fn(theirs[:4], theirs[shift : shift + 4])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine, theirs)


def test_windows_and_layouts(graphs: list[GraphCall]) -> None:
    program = compiled(lambda x: (x.sin() * 2).sum(0))
    memory = torch.randn(8, 8, requires_grad=True)
    for window in (memory, memory[2:], memory.t(), memory[:, ::2], memory[1:3, 3], memory[0].expand(5, 8)):
        want = torch.autograd.grad((window.sin() * 2).sum(0).square().sum(), memory)
        torch.testing.assert_close(torch.autograd.grad(program(window).square().sum(), memory), want)


# ---------------------------------------------------------------- sizes and numbers


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_sizes_that_vary(dynamic: bool | None, graphs: list[GraphCall]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(x.shape[0] * 2, -1).softmax(-1) / x.shape[0]).sum(1)

    program = compiled(fn, dynamic=dynamic)
    for n in (4, 5, 6, 4, 9, 1, 12):
        x = torch.randn(n, 8, requires_grad=True)
        torch.testing.assert_close(program(x), fn(x))
        torch.testing.assert_close(torch.autograd.grad(program(x).max(), x), torch.autograd.grad(fn(x).max(), x))
    if dynamic:
        assert len(graphs) <= 2 and any(not isinstance(a, torch.Tensor) for g in graphs for a in _placeholders(g))


def _placeholders(graph: GraphCall) -> list[Any]:
    return [n.meta.get("example_value") for n in graph.graph_module.graph.nodes if n.op == "placeholder"]


def test_numbers_among_the_inputs() -> None:
    program = compiled(lambda x, n, s: x * n + s, dynamic=True)
    for n, s in ((2, 0.5), (3, 0.5), (4, 1.5), (4, -0.0), (5, float("inf"))):
        torch.testing.assert_close(program(torch.ones(3), n, s), torch.ones(3) * n + s)


# ---------------------------------------------------------------- modules and training


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_eager(optimizer: Any, tier: str, graphs: list[GraphCall]) -> None:
    torch.manual_seed(0)
    mine = Net()
    theirs = copy.deepcopy(mine)
    program = compiled(mine)
    steps = [(program, optimizer(mine.parameters(), lr=0.01)), (theirs, optimizer(theirs.parameters(), lr=0.01))]
    for _ in range(4):
        x, y = torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))
        losses = []
        for model, step in steps:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    mine.eval(), theirs.eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(program(x), theirs(x), rtol=1e-3, atol=1e-4)
    assert len(graphs) == 2 and all(g.kinds for g in graphs)  # for training, and for evaluation
    assert not any("FAIL" in fallback for fallback in torchlazy.metrics()["fallbacks"])


def test_a_loss_inside(tier: str) -> None:
    model = nn.Linear(4, 3)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    program = compiled(loss, fullgraph=True)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    for _ in range(2):
        mine = torch.autograd.grad(program(x, y), list(model.parameters()))
        assert_same(mine, torch.autograd.grad(loss(x, y), list(model.parameters())))


def test_gradients_accumulate_and_graphs_are_used_twice(tier: str) -> None:
    model = nn.Linear(4, 3)
    other = copy.deepcopy(model)
    program = compiled(model)
    x = torch.randn(6, 4)
    for net, call in ((model, program), (other, other)):
        result = call(x).square().sum()
        result.backward(retain_graph=True)
        result.backward()
        del net
        call(x).sum().backward()
    assert_same(model.weight.grad, other.weight.grad)
    used = program(x).sum()
    used.backward()
    with pytest.raises(RuntimeError, match="second time"):
        used.backward()


def test_gradients_of_gradients(tier: str, graphs: list[GraphCall]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    other = copy.deepcopy(model)
    program = compiled(model)
    for _ in range(3):  # the first by the graph itself, the others recorded
        x = torch.randn(5, 4)
        found = []
        for call, net in ((program, model), (other, other)):
            given = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(call(given).sum(), given, create_graph=True)
            found.append(torch.autograd.grad((gradient.norm(dim=1) - 1).square().mean(), net[0].weight)[0])
        torch.testing.assert_close(*found)
    (graph,) = graphs
    assert graph.orders == 2 and all(kind.joint.double is not None for kind in graph.kinds.values())


def test_gradients_of_gradients_that_need_another_call() -> None:
    program = compiled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="call the model again"):
        torch.autograd.grad(program(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(program(x).sum(), x, create_graph=True)[0].requires_grad


def test_dropout_draws_anew(tier: str) -> None:
    program = compiled(nn.Dropout(0.5))
    x = torch.ones(400, requires_grad=True)
    torch.manual_seed(0)
    first, second = program(x), program(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    again = program(x)
    torch.testing.assert_close(first, again)
    assert 120 < (again != 0).sum() < 280
    (gradient,) = torch.autograd.grad(again.sum(), x)
    torch.testing.assert_close(gradient, (again != 0) * 2.0)  # backward has the mask of forward


def test_random_factories_follow_the_seed() -> None:
    program = compiled(lambda x: x + torch.rand(5) + torch.randn_like(x))
    torch.manual_seed(1)
    first = program(torch.zeros(5))
    torch.manual_seed(1)
    torch.testing.assert_close(program(torch.zeros(5)), first)
    assert not torch.equal(program(torch.zeros(5)), first)


def test_graph_breaks(graphs: list[GraphCall]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum() > 0:  # torch's capture breaks here
            return y.sin()
        return y.cos()

    program = compiled(fn)
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3, requires_grad=True)):
        torch.testing.assert_close(program(x), fn(x))
    assert len(graphs) >= 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(fn, fullgraph=True)(torch.ones(3))


def test_grad_modes(graphs: list[GraphCall]) -> None:
    model = nn.Linear(3, 3)
    program = compiled(model)
    x = torch.randn(2, 3)
    assert program(x).requires_grad
    with torch.no_grad():
        assert not program(x).requires_grad
    with torch.inference_mode():
        inside = program(x)
        assert not inside.requires_grad
    torch.testing.assert_close(inside.clone(), model(x).detach())
    assert program(x).requires_grad


def test_autocast_around(tier: str) -> None:
    model = nn.Linear(8, 8)
    program = compiled(model)
    x = torch.randn(4, 8)
    assert program(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = program(x), model(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(program(x), model(x))


def test_hooks_and_frozen_parameters(tier: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    seen: list[float] = []
    model[1].weight.register_hook(lambda g: seen.append(float(g.sum())) or g * 2)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 3)
    compiled(model)(x).sum().backward()
    other(x).sum().backward()
    assert model[0].weight.grad is None and len(seen) == 1
    torch.testing.assert_close(model[1].weight.grad, other[1].weight.grad * 2)
    torch.testing.assert_close(model[0].bias.grad, other[0].bias.grad)


def test_checkpoint_regions() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sum()

    x = torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wraps such a region in an operator of its own: it may run eagerly
        program = compiled(fn)
        for _ in range(2):
            assert_same(torch.autograd.grad(program(x), x), torch.autograd.grad(fn(x), x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_regions_drop_what_they_dropped(reentrant: bool, tier: str, graphs: list[GraphCall]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        region = lambda y: F.dropout(torch.sin(y), 0.5)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=reentrant) * 2

    program = compiled(fn)
    kept = []
    for _ in range(3):
        x = torch.full((100,), 0.3, requires_grad=True)
        out = program(x)
        out.sum().backward()
        kept.append(out != 0)
        torch.testing.assert_close(x.grad, torch.where(kept[-1], 4 * torch.cos(torch.tensor(0.3)), 0.0))
        assert 20 < int(kept[-1].sum()) < 80
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])
    assert all(graph.kinds for graph in graphs)


def test_eagers_own_random_bits() -> None:
    torchlazy.config.rng = "eager"
    fn = lambda x: F.dropout(torch.sin(x), 0.5)  # noqa: E731
    program = compiled(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs eagerly, and says so
        for turn in range(3):
            found = []
            for call in (fn, program):
                torch.manual_seed(turn)
                x = torch.ones(50, requires_grad=True)
                out = call(x)
                out.sum().backward()
                found.append((out.detach(), x.grad, torch.rand(1)))
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_regions_with_eagers_own_random_bits(reentrant: bool) -> None:
    """The recording gives way to an eager run in the midst of a region, whose hooks torch 2.11 then leaves open."""
    torchlazy.config.rng = "eager"
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant).square()

    program = compiled(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs eagerly, and says so
        for turn in range(2):
            found = []
            for call in (fn, program):
                torch.manual_seed(turn)
                inner.zero_grad()
                x = torch.ones(3, 4, requires_grad=True)
                out = call(x)
                out.sum().backward()
                found.append((out.detach(), x.grad, *[p.grad.clone() for p in inner.parameters()]))
            torch.testing.assert_close(*found)


def test_an_unmodified_language_model(tier: str, graphs: list[GraphCall]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    mine = transformers.GPT2LMHeadModel(config)
    theirs = copy.deepcopy(mine)
    program = compiled(mine)
    ids = torch.randint(0, 99, (2, 12))
    steps = [(program, mine), (theirs, theirs)]
    for _ in range(3):
        losses = [call(input_ids=ids, labels=ids).loss for call, _ in steps]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.backward()
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert graphs and not any(g.why_eager for g in graphs)


# ---------------------------------------------------------------- what does not fit


def test_graphs_that_cannot_be_recorded_run_eagerly() -> None:
    program = compiled(lambda x: x[x > 0].sum())
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.warns(RuntimeWarning, match=r"eagerly: \S+ .*data-dependent shape, at \S+end.py:\d+$"):
            assert program(torch.tensor([1.0, -1.0, 2.0])) == 3
        assert program(torch.tensor([1.0, 5.0, 2.0])) == 8


def test_errors_of_the_program_are_eagers() -> None:
    program = compiled(lambda x, y: torch.nn.functional.embedding(y, x))
    table = torch.randn(4, 2)
    torch.testing.assert_close(program(table, torch.tensor([0, 3])), table[[0, 3]])
    with pytest.raises(IndexError):
        program(table, torch.tensor([0, 9]))
    torch.testing.assert_close(program(table, torch.tensor([1, 2])), table[[1, 2]])


def test_settings_of_other_back_ends_are_refused() -> None:
    with pytest.raises(Exception, match=r"mode='max-autotune'.*settings of torch's own back end"):
        compiled(lambda x: x + 1, mode="max-autotune")(torch.ones(2))
    with pytest.raises(ValueError, match=r"torchlazy.compile\(model, mode="):
        torchlazy_backend(torch.fx.symbolic_trace(lambda x: x), [], options={"a": 1})


def test_it_is_found_by_name() -> None:
    assert "torchlazy" in torch.compiler.list_backends()
    assert torch._dynamo.lookup_backend("torchlazy") is torchlazy_backend


def test_lazy_mode_around_records_as_ever() -> None:
    program = compiled(lambda x: x.sin() + 1)
    x = torch.randn(4)
    with torchlazy.lazy_mode():
        result = program(x)
    torch.testing.assert_close(torch.as_tensor(result.tolist()), x.sin() + 1)


@pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")
def test_in_a_native_block_a_graph_is_part_of_what_is_recorded() -> None:
    """As in a block that is recorded in Python: no cut before it."""
    assert LIBRARY.wait() is not None
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    other, were = copy.deepcopy(model), []
    program = compiled(model)
    with followed():
        for turn in range(8):
            x = torch.full((3, 4), turn / 8)
            with torchlazy.lazy_mode():
                found = program(x * 2 + 1)
                found.square().sum().backward()
                were.append(LIBRARY.module.is_deferred(found.detach()))
            want = other(x * 2 + 1)
            want.square().sum().backward()
            torch.testing.assert_close(found, want)
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
                p.grad = q.grad = None
    assert were[-1]


def test_a_detached_result_beside_the_one_that_it_is_of() -> None:
    weight = torch.ones(3, requires_grad=True)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * weight.sum()
        return y.detach(), y * 1, y

    def other(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * weight.sum()
        return y.view(-1), y.detach()

    for one in (fn, other):
        program = compiled(one)
        for _ in range(2):
            found, want = program(torch.arange(3.0)), one(torch.arange(3.0))
            assert [(t.requires_grad, t.is_leaf) for t in found] == [(t.requires_grad, t.is_leaf) for t in want]
            assert_same(found, want)


def test_a_backward_behind_a_graph_break_is_not_captured() -> None:
    """torch's capture goes on after the break: it would capture our Python."""
    p, base = torch.ones(3, requires_grad=True), torch.ones(4, 3)
    window = base[1:3]

    def fn(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
        base[1].add_(1)
        y = window * 1
        told = float((x.detach() * 2).cpu().numpy().sum())
        (p * scale).sum().backward()
        return y, told

    program = torch.compile(fn, backend="torchlazy")
    for turn in range(3):
        y, told = program(torch.ones(3), 2.0)
        assert told == 6.0 and p.grad is not None and p.grad.tolist() == [2.0 * (turn + 1)] * 3
        assert y[0].tolist() == [float(turn + 2)] * 3


def _sets_the_default_dtype(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state.add_(1)
    return x * float(np.full(2, 1.5, np.float32).sum())  # torch's capture of NumPy sets it for a moment


def _takes_other_memory(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state.data = state.detach()[::2] * 2
    return x + 1


def _turns_an_input(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state.unsqueeze_(0)
    return x + state.sum()


@pytest.mark.parametrize("function", [_sets_the_default_dtype, _takes_other_memory, _turns_an_input])
def test_inputs_that_the_graph_changes(function: Any) -> None:
    run = torch.compile(function, backend="torchlazy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # some graphs run eagerly
        for _ in range(4):
            given, other = torch.arange(4.0), torch.arange(4.0)
            assert torch.equal(run(given, torch.ones(2)), function(other, torch.ones(2)))
            assert torch.equal(given, other) and given.stride() == other.stride() and given._version == other._version


def test_the_bits_of_eager_are_drawn_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlazy.config, "rng", "eager")

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(3)

    run = torch.compile(draw, backend="torchlazy")
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning, match="draws its numbers at once"):
        found = [run(torch.zeros(3)) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(a, draw(torch.zeros(3))) for a in found)


def test_what_is_detached_from_a_result_is_a_tensor_of_its_own() -> None:
    by_us = torch.compile(lambda x: (y := x * 2, y.detach(), y), backend="torchlazy")
    for _ in range(2):
        result, detached, again = by_us(torch.arange(3))
        assert result is again
        assert detached is not result
        result.add_(1)
        assert detached.tolist() == [1, 3, 5]


def test_writes_through_data_raise_no_version() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.copysign(x, x)
        z = y * 1
        torch._dynamo.graph_break()
        y.data.mul_(0.5)
        return z

    by_us = torch.compile(function, backend="torchlazy")
    for _ in range(2):
        ours, eagers = (torch.arange(1.0, 4.0, requires_grad=True) for _ in range(2))
        by_us(ours).sum().backward()
        function(eagers).sum().backward()
        assert ours.grad is not None
        assert eagers.grad is not None
        assert ours.grad.tolist() == eagers.grad.tolist()
    rows = torch.zeros(4, 2)
    torch.compile(lambda x: x.unfold(0, 2, 1).data[0].fill_(1), backend="torchlazy")(rows)
    assert rows.sum() == 4
    assert rows._version == 0


def test_hooks_of_inputs_do_not_run_where_no_gradient_comes() -> None:
    """torch calls them with None where one of several results of a node is differentiated."""
    by_us = torch.compile(lambda x, y: (x * 2, y * 3), backend="torchlazy")
    for _ in range(3):
        x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
        x.register_hook(lambda gradient: gradient * 3)
        first, second = by_us(x, y)
        second.sum().backward()
        assert x.grad is None
        first.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [6, 6]


def test_a_backward_does_not_come_to_inputs_that_no_result_depends_on() -> None:
    """The graph that is behind such an input has its own backward afterwards."""
    weight = torch.ones(2, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.data[:1] = 2
        (weight * weight).sum().backward()
        return x

    by_us = torch.compile(function, backend="torchlazy")
    for _ in range(3):
        leaf = torch.ones(3, requires_grad=True)
        by_us(leaf * 1.5).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [1.5, 1.5, 1.5]
