"""The native recorder: what is seen first runs at once, what is known is deferred, and every value is eager's."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchlazy.lazy.api import driver
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.native.graphs import RunsInPython
from torchlazy.lazy.record.recorder import current
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime import executor
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.program.program import ExternCall, Program, ValueRef
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from tests.fuzz.ways import followed

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _followed() -> Iterator[None]:
    assert LIBRARY.wait() is not None, LIBRARY.reason
    with followed():
        LIBRARY.module.reset_counts()
        yield


def counts() -> dict[str, int]:
    return dict(LIBRARY.module.counts())


def is_deferred(tensor: Tensor) -> bool:
    return bool(LIBRARY.module.is_deferred(tensor))


def assert_same(have: Any, want: Any, place: str = "") -> None:
    """Equal bit for bit, as far as there is a value; anything else by ==."""
    if isinstance(want, (list, tuple)):
        assert type(have) is type(want) and len(have) == len(want), place
        for number, pair in enumerate(zip(have, want, strict=True)):
            assert_same(*pair, f"{place}[{number}]")
    elif isinstance(want, Tensor):
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{place}: {text}")
    elif isinstance(want, np.ndarray):
        np.testing.assert_array_equal(have, want, place)
    else:
        assert have == want, place


def by_the_driver() -> None:
    """From here on traces get the driver's own programs."""
    tiers = driver.tiers
    tiers.look_up = type(tiers).look_up.__get__(tiers)  # type: ignore[method-assign]
    driver.real().__dict__.pop("run_compiled", None)


# ---------------------------------------------------------------------------------------------- whole programs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x)), inplace=True).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.flatten(2).transpose(1, 2)[:, :4, :2].repeat(1, 1, 4)).mean(1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "single": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def trained(model: type[nn.Module], optimizer: str, native: bool, steps: int = 7, clip: bool = False) -> list[Any]:
    torch.manual_seed(0)
    net = model()
    own = OPTIMIZERS[optimizer](net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(own, 2)
    found: list[Any] = []
    for _ in range(steps):
        x, y = torch.randn(4, 2, 6, 6), torch.randint(3, (4,))
        with torchlazy.lazy_mode() if native else contextlib.nullcontext():
            own.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            own.step()
        schedule.step()
        found.append([loss.item(), *(p.detach().clone() for p in net.parameters()), *net.buffers()])
        found.append([p._version for p in net.parameters()])
        found[-2] = [v.clone() if isinstance(v, Tensor) else v for v in found[-2]]
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [Net, Attention])
def test_training_is_eagers_bit_for_bit(model: type[nn.Module], optimizer: str) -> None:
    have = trained(model, optimizer, native=True, clip=optimizer == "adamw")
    seen = counts()
    want = trained(model, optimizer, native=False, clip=optimizer == "adamw")
    assert_same(have, want)
    assert seen["programs"] >= 3 and seen["deferred"] > 50, seen


def test_compiled_programs_train() -> None:
    by_the_driver()
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    own = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for step in range(8):
        x = torch.randn(5, 6)
        for number, (net, optimizer) in enumerate(zip(nets, own, strict=True)):
            with torchlazy.lazy_mode() if number == 0 else contextlib.nullcontext():
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        if step == 3:
            torchlazy.wait_for_compile()
        torch.testing.assert_close([*nets[0].parameters()], [*nets[1].parameters()], rtol=1e-5, atol=1e-6)
    assert counts()["programs"] >= 1, LIBRARY.module.traces()


def _block(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh().mul(0.5).add(x)


@pytest.mark.parametrize("at", range(12))
def test_a_difference_at_any_operator(at: int) -> None:
    """A known trace is left at operator `at`: the deferred part runs by itself, and the rest goes on at once."""

    def program(turn: int) -> list[Any]:
        torch.manual_seed(turn)
        w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
        buffer = torch.zeros(2, 3)
        values = [x]
        for place in range(12):
            if turn % 2 and turn > 3 and place == at:
                values.append(values[-1].exp().clamp(max=3))
            values.append([_block(values[-1], w), values[-1].relu(), values[-1] * 0.5][place % 3])
            with torch.no_grad():
                buffer.add_(values[-1])
        values[-1].sum().backward()
        return [values[-1].detach(), buffer, w.grad, buffer._version]

    for turn in range(9):
        with torchlazy.lazy_mode():
            have = program(turn)
        assert_same(have, program(turn))
    assert counts()["deferred"] > 20


# ---------------------------------------------------------------------------------------------- who reads

READERS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy().copy(),
    "array": lambda t: np.asarray(t.detach()).copy(),
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t[0, 0]),
    "bool": lambda t: bool((t > 0).all()),
    "print": lambda t: repr(t.detach()),
    "format": lambda t: f"{t[0, 0]:.3f}",
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).clone(),
    "storage": lambda t: list(t.detach().untyped_storage()),
    "address": lambda t: np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 4).from_address(t.data_ptr())).copy(),
    "data": lambda t: t.data.tolist(),
    "iteration": lambda t: [row.tolist() for row in t],
    "equal": lambda t: torch.equal(t, t.clone()),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "unique": lambda t: t.unique(),
    "new": lambda t: torch.tensor(t.detach().tolist()),
    "thread": lambda t: _in_thread(t),
    "hash": lambda t: {t: 1}[t],
    "save": lambda t: _saved(t),
    "share": lambda t: t.detach().clone().share_memory_().tolist(),
}  # fmt: skip


def _in_thread(tensor: Tensor) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tensor.tolist()))
    thread.start()
    thread.join()
    return found


def _saved(tensor: Tensor) -> Tensor:
    import io

    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("what", ["result", "view", "written", "alias of written", "window of written"])
@pytest.mark.parametrize("reader", READERS)
def test_readers_get_the_value(reader: str, what: str) -> None:
    weight, base = torch.arange(4.0).view(2, 2), torch.arange(8.0)
    alias, window = weight.view(2, 2), base[2:6].view(2, 2)

    def program(x: Tensor) -> Any:
        y = (x * 2 + 1).relu()
        if what == "result":
            read = y.sin()
        elif what == "view":
            read = y.t()
        elif what == "window of written":
            base.copy_(base * 0.5 + y.sum())
            read = window
        else:
            weight.mul_(0.5).add_(y)
            read = weight if what == "written" else alias
        before = is_deferred(read)
        found = READERS[reader](read)
        return found, before, read.clone(), y * 2

    first = (weight.clone(), base.clone())
    runs = []
    for native in (True, False):
        weight.copy_(first[0]), base.copy_(first[1])
        runs.append([])
        for _ in range(5):
            with torchlazy.lazy_mode() if native else contextlib.nullcontext():
                runs[-1].append(program(torch.ones(2, 2)))
    if what in ("result", "view") or reader not in (
        "numpy",
        "array",
    ):  # NumPy has memory of the second kind from then on
        assert any(before for _, before, *_ in runs[0]), "nothing was deferred"
    for have, want in zip(*runs, strict=True):
        assert_same((have[0], *have[2:]), (want[0], *want[2:]))


# ---------------------------------------------------------------------------------------------- semantics


def _views(x: Tensor) -> Any:
    y = x.clone()
    row, columns = y[0], y.t()
    row.mul_(2)
    columns[1].add_(1)
    y[:, ::2].zero_()
    return y, row, columns, y.view(-1)[1:3]


def _in_place_on_argument(x: Tensor) -> Any:
    x.add_(1)
    x.view(-1)[::2].mul_(3)
    x.t()[0].copy_(torch.ones(x.shape[0]))
    return x.sum()


def _shapes_in_place(x: Tensor) -> Any:
    y = x * 2
    y.t_()
    y.unsqueeze_(0)
    z = x + 1
    z.resize_(2, 2)
    return y, z, z.stride(), y.stride()


def _data_and_set(x: Tensor) -> Any:
    y = x * 2
    z = torch.zeros(3, 4)
    z.data = y
    u = torch.empty(0)
    u.set_(y)
    u.add_(1)
    return y, z + 1, u, y.data.add_(1)


def _out(x: Tensor) -> Any:
    out, grown = torch.empty(3, 4), torch.empty(0)
    torch.add(x, 1, out=out)
    torch.mul(x, 2, out=grown)
    return out * 2, grown


def _doubly(x: Tensor) -> Any:
    w = (x * 0.5).detach().requires_grad_()
    (g,) = torch.autograd.grad((w.sin() * x).pow(3).sum(), w, create_graph=True)
    g.square().sum().backward()
    return w.grad, g.detach()


def _hooks(x: Tensor) -> Any:
    seen: list[Tensor] = []
    w = x.clone().requires_grad_()
    y = w * 3
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    w.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))  # type: ignore[union-attr]
    y.relu().sum().backward()
    return w.grad, y.grad, seen


def _checkpointed(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    checkpoint(lambda t: (t.sin() * t).exp(), w, use_reentrant=False).sum().backward()
    checkpoint(lambda t: (t.sin() * t).exp(), w, use_reentrant=True).sum().backward()
    return w.grad


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 2 + x


def _function(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    _Double.apply(w).sin().sum().backward()
    return w.grad


def _accumulated(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    for scale in (1.0, 2.0, 3.0):
        (w * scale).tanh().sum().backward()
    kept = w.grad
    (w * kept.detach()).sum().backward()
    return w.grad, kept, kept is w.grad


def _functional(x: Tensor) -> Any:
    return (
        torch.func.vmap(torch.func.grad(lambda t: (t.sin() * t).sum()))(x),
        torch.func.jvp(torch.sin, (x,), (x.cos(),)),
        torch.func.hessian(lambda t: t.pow(3).sum())(x[0]),
    )


def _inference(x: Tensor) -> Any:
    with torch.inference_mode():
        y = F.layer_norm(F.linear(x, x), (3,)).relu()
        z = torch.einsum("ij,kj->ik", x, x)
    return y.clone(), z.clone(), y.is_inference()


def _random(x: Tensor) -> Any:
    y = F.dropout(x, 0.5) + torch.randn(3, 4) + torch.rand_like(x)
    y.normal_()
    return y, torch.bernoulli(x.sigmoid()), torch.randperm(4)


def _dropped_natively(x: Tensor) -> Any:
    """As F.dropout does on a GPU."""
    torch.manual_seed(3 + _TURN[0] // 2)
    w = torch.ones(4, requires_grad=True)
    found = []
    for p, train in ((0.5, True), (0.25, None), (0.0, True), (1.0, True), (0.5, False)):
        y, mask = torch.native_dropout((x * w).t(), p, train)
        y.mul_(2).sum().backward()
        found += [y.detach(), mask]
    return found, w.grad, torch.get_rng_state()


def _autocast(x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, x)
        z = F.softmax(y, -1)
    return y, z, y.dtype, z.dtype


def _branch_on_data(x: Tensor) -> Any:
    y = x.sum()
    total = y * 2
    if y > 3:
        total = total.exp()
    return total + y.item(), x[x > 0.5]


def _lists(x: Tensor) -> Any:
    parts = list(x.split(1))
    torch._foreach_mul_(parts, 2.0)
    sums = torch._foreach_add(parts, 1)
    return x, sums, torch._foreach_norm(sums), torch.stack(sums).unbind(1), [p._version for p in parts]


def _complex(x: Tensor) -> Any:
    z = torch.complex(x, x + 1)
    return z.conj() * 2, z.imag + 1, torch.view_as_real(z).sum(), (z * 1j).abs(), z.conj().sum()


def _sparse(x: Tensor) -> Any:
    table = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(torch.arange(15.0).view(5, 3))
    table(torch.tensor([1, 3, 1])).sum().backward()
    return table.weight.grad.to_dense(), (x.to_sparse() * 2).to_dense()


def _errors(x: Tensor) -> Any:
    y = x * 2 + 1
    with contextlib.suppress(RuntimeError):
        y @ y
    with contextlib.suppress(IndexError):
        y[7]
    w = y.detach().requires_grad_()
    z = w * 2
    u = z.exp()
    z_error = ""
    u.add_(1)
    try:
        u.sum().backward()
    except RuntimeError as error:
        z_error = str(error)[:60]
    return y, z_error


def _numbers(x: Tensor) -> Any:
    lr = 0.1 / (1 + _TURN[0])
    return x.add(x, alpha=lr), x * lr, x - 2, x.pow(2), torch.where(x > lr, x, lr), x.clamp(min=lr), x / (3 + _TURN[0])


def _shared(x: Tensor) -> Any:
    array = np.ones((3, 4), np.float32)
    t = torch.from_numpy(array)
    y = t + x
    array[:] = 3
    t.mul_(2)
    lent = (x * 2).numpy()
    return y, array.copy(), lent.copy(), t + 0


def _lstm(x: Tensor) -> Any:
    torch.manual_seed(1)
    net = nn.LSTM(4, 3, 2, batch_first=True)
    out, (h, c) = net(x[None])
    out.sum().backward()
    return out, h, c, [p.grad for p in net.parameters()]


def _saved_hooks(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), lambda a: torch.from_numpy(a)):
        y = (w.sin() * w).sum()
    y.backward()
    return w.grad


def _forward_ad(x: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x * 2)
        primal, tangent = torch.autograd.forward_ad.unpack_dual((dual * dual).sin())
    return primal, tangent


class _Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _SEEN.append(func.name())
        return func(*args, **(kwargs or {}))


def _other_mode(x: Tensor) -> Any:
    with _Counted():
        y = (x * 2).relu().sum()
    names = list(_SEEN)
    _SEEN.clear()
    return y, names


def _anomaly(x: Tensor) -> Any:
    w = x.clone().requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        (w * 2).exp().sum().backward()
    return w.grad


def _sizes(x: Tensor) -> Any:
    part = x[: 1 + _TURN[0] % 3]
    return (part * 2 + 1).sum(0), part.t() @ part


def _linear_of_transposed(x: Tensor) -> Any:
    """The bias is added in place to a view that does not say it is one (`_unsafe_view`)."""
    y = torch.stack([x, x + 1]).transpose(0, 1)
    return F.linear(y, x, x[:, 0]), F.linear(y.contiguous(), x.clone(), x[:, 1].clone())


def _predicted_between_steps(x: Tensor) -> Any:
    """An LSTM trains and predicts in turn: its kernel asks the grad mode, and the traces part behind it."""
    torch.manual_seed(1)
    net, head = nn.LSTM(4, 3, 2, batch_first=True), nn.Linear(3, 5)
    if _TURN[0] % 3 == 2:
        with torch.no_grad():
            return head(net(x[None])[0]).square().sum().item()
    loss = F.cross_entropy(head(net(x[None])[0])[0], torch.tensor([0, 1, 2]))
    loss.backward()
    return loss, [p.grad for p in (*net.parameters(), *head.parameters())]


_TURN, _SEEN = [0], list[str]()
PROGRAMS = [
    _views, _in_place_on_argument, _shapes_in_place, _data_and_set, _out, _doubly, _hooks, _checkpointed, _function,
    _accumulated, _functional, _inference, _random, _dropped_natively, _autocast, _branch_on_data, _lists, _complex,
    _sparse, _errors, _numbers, _shared, _lstm, _saved_hooks, _forward_ad, _other_mode, _anomaly, _sizes,
    _linear_of_transposed, _predicted_between_steps,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", ["each", "all", "none without gradients"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__.strip("_"))
def test_programs(program: Callable[[Tensor], Any], around: str) -> None:
    runs = []
    for native in (True, False):
        torch.manual_seed(3)
        block = torchlazy.lazy_mode if native else contextlib.nullcontext
        runs.append([])
        with block() if around == "all" else contextlib.nullcontext():
            for turn in range(8):
                _TURN[0] = turn
                x = torch.rand(3, 4)
                with block() if around != "all" else contextlib.nullcontext():
                    runs[-1].append((program(x), x, x._version))
                if around != "all":
                    assert not BLOCKS.depth
    assert_same(runs[0], runs[1])
    assert all(type(t) is Tensor for t in _leaves(runs[0])), "a class of ours"
    assert counts()["cuts"] > 0 or program is _other_mode  # before torch 2.13 such a mode sees them one by one


def _leaves(value: Any) -> Iterator[Tensor]:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _leaves(item)


# ---------------------------------------------------------------------------------------------- traces in parts


def test_blocks_that_are_skipped_become_parts_of_their_own() -> None:
    layers = [nn.Sequential(nn.Linear(4, 5 + n), nn.Linear(5 + n, 4)) for n in range(6)]
    chance = random.Random(0)

    def forward(x: Tensor, taken: list[bool]) -> Tensor:
        for layer, is_taken in zip(layers, taken, strict=True):
            if is_taken:
                x = x + F.relu(layer(x)).mul(0.5).tanh()
        return x.sum()

    for _ in range(60):
        taken = [chance.random() < 0.5 for _ in layers]
        x = torch.randn(2, 4)
        with torch.no_grad():
            with torchlazy.lazy_mode():
                have = forward(x, taken)
            assert_same(have, forward(x, taken))
    seen, causes = counts(), LIBRARY.module.causes()
    assert seen["programs"] >= 40 and seen["deferred"] > seen["logged"], seen
    assert causes["known traces part here"] and causes["end of a known trace"] >= 20, causes


def test_an_extra_term_now_and_then_leaves_the_usual_trace_followed() -> None:
    w = torch.randn(4, 4)
    for turn in range(40):
        x = torch.randn(3, 4)

        def program(x: Tensor = x, turn: int = turn) -> Tensor:
            y = ((x @ w).relu() @ w).tanh()
            loss = y.square().mean() + y.abs().mean()
            if turn % 10 == 9:
                loss = loss + y.exp().sum().log() * 0.1
            return loss * 2

        with torchlazy.lazy_mode():
            have = program()
        assert_same(have, program())
    seen = counts()
    assert seen["deferred"] > 2 * seen["logged"], seen


# ---------------------------------------------------------------------------------------------- threads and lifetime


def test_threads_record_side_by_side() -> None:
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for turn in range(30):
                generator = torch.Generator().manual_seed(seed * 100 + turn)
                x = torch.randn(3, 3, generator=generator)
                with torchlazy.lazy_mode():
                    y = (x @ x).relu() + x
                    z = y.sum() * 2
                torch.testing.assert_close((y, z), ((x @ x).relu() + x, ((x @ x).relu() + x).sum() * 2))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads), errors


def test_a_block_ends_while_another_thread_has_the_recorder() -> None:
    x = torch.randn(3, 3)

    def work() -> None:
        for _ in range(4):
            with torchlazy.lazy_mode():
                ((x @ x).relu() + x).sum()

    thread = threading.Thread(target=work, daemon=True)
    with current().lock:
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def test_values_outlive_the_block_and_memory_is_freed() -> None:
    import weakref

    kept = []
    for _ in range(6):
        x = torch.ones(1000)
        with torchlazy.lazy_mode():
            y = x * 2
            z = (y + 1).relu()
            kept.append(z[:1])
        reference = weakref.ref(x)
        del x, y, z
        assert reference() is None
    assert [t.item() for t in kept] == [3.0] * 6


def test_an_error_in_the_block_leaves_what_came_before() -> None:
    for _ in range(5):
        x = torch.ones(2, 2)
        with pytest.raises(ValueError), torchlazy.lazy_mode():
            y = x * 3
            x.add_(1)
            z = y + x
            raise ValueError
        assert (x.tolist(), y.tolist(), z.tolist()) == ([[2.0] * 2] * 2, [[3.0] * 2] * 2, [[5.0] * 2] * 2)


def test_flush_runs_what_is_deferred() -> None:
    for turn in range(5):
        with torchlazy.lazy_mode():
            y = (torch.ones(2) * 2 + 1).exp().log()
            was_deferred = is_deferred(y)
            torchlazy.flush()
            assert not is_deferred(y)
        assert was_deferred or turn < 2


def test_dropout_leaves_one_trace() -> None:
    """Its numbers are drawn where it is called, and nothing waits for them."""
    x, w = torch.rand(6, 6), torch.rand(6, 6)
    for _ in range(5):
        with torchlazy.lazy_mode():
            for _ in range(3):
                y, _mask = torch.native_dropout(x @ w, 0.5, True)
                y = y.relu() @ w
    assert counts()["cuts"] == 5 and counts()["deferred"] > 0 and not counts()["at_once"]


def test_what_is_seen_and_cut_is_counted_with_its_line() -> None:
    torchlazy.reset_metrics()
    x = torch.ones(4)
    with torchlazy.lazy_mode():
        for _ in range(3):
            y = x * 2 + 1
            assert y.sum().item() == 12
    found = torchlazy.report()
    assert [(line.cause, line.count) for line in found.cuts if line.cause == "item"] == [("item", 3)]
    assert all("test_native_recorder" in line.frame for line in found.cuts)
    assert torchlazy.metrics()["ops"] >= 9


def test_no_sync_inside_a_block_sees_the_reads() -> None:
    by_the_driver()
    x = torch.ones(4)
    with torchlazy.lazy_mode():
        y = x * 2
        with torchlazy.no_sync():
            z = y + 1
            with pytest.raises(torchlazy.SyncError, match="item"):
                z.sum().item()
        assert z.tolist() == [3.0] * 4 and y.tolist() == [2.0] * 4


def test_the_recorder_in_python_takes_over_where_each_cut_is_looked_at(tmp_path: Any) -> None:
    by_the_driver()
    with torchlazy.dump(tmp_path), torchlazy.lazy_mode():
        y = torch.ones(2) * 2
        assert torchlazy.is_lazy(y)
    assert y.tolist() == [2.0, 2.0]
    torchlazy.config.native = "off"
    with torchlazy.lazy_mode():
        assert torchlazy.is_lazy(torch.ones(2) * 2)


def test_blocks_run_as_in_eager_until_the_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_driver()
    monkeypatch.setattr(BLOCKS, "library", None)
    monkeypatch.setattr(DEVICE, "target", "")
    monkeypatch.setattr(current(), "mark_result", None)
    monkeypatch.setattr(BLOCKS, "may_record", False)
    monkeypatch.setattr(LIBRARY, "module", None)
    monkeypatch.setattr(LIBRARY, "start", lambda: None)
    for reason, is_recorded in (("", False), ("no C++ compiler", True)):
        monkeypatch.setattr(LIBRARY, "reason", reason)
        with torchlazy.lazy_mode():
            y = torch.ones(2) * 2
            assert torchlazy.is_lazy(y) == is_recorded
        assert y.tolist() == [2.0, 2.0]


def test_a_program_that_runs_in_a_block_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads memory past what is deferred; its own operators were recorded, and kernels read what was not there."""
    monkeypatch.setattr(executor, "_RUNS_IN_PYTHON", -1)
    meta = TensorMeta((8,), torch.float32, (1,))
    steps = (
        ExternCall("aten.exp.default", (ValueRef("x"),), (), ("a",), (meta,)),
        ExternCall("aten.neg.default", (ValueRef("a"),), (), ("b",), (meta,)),
    )
    program = executor.load(Program((("x", meta),), (), (), steps, ("b",), (meta,)), [])
    were = []
    for turn in range(8):
        start = torch.full((8,), turn / 8)
        with torchlazy.lazy_mode():
            x = start * 2 + 1
            were.append(is_deferred(x))
            (found,) = program.run([x])
            assert not is_deferred(found) and not is_deferred(x)
        torch.testing.assert_close(found, -(start * 2 + 1).exp())
    assert were[-1] and program.native is not None and program.native.has_run


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_program_whose_traces_do_not_come_again_runs_unrecorded(device: str) -> None:
    """For a while; then what comes again is found, and followed."""
    library, chance = LIBRARY.module, random.Random(0)
    library.for_tests(8, True)
    start, rested = torch.linspace(-1, 1, 4), []

    def odd(x: Tensor, made: Tensor) -> Tensor:
        for _ in range(400):
            x = chance.choice([Tensor.sin, Tensor.neg, Tensor.tanh, Tensor.abs])(x)
        made.add_(1)  # nobody notices: what a factory made is known no more
        return x

    def block() -> Any:
        return torchlazy.lazy_mode() if device == "cpu" else contextlib.nullcontext()

    made, want = torch.zeros((), device=device), torch.zeros(())
    for turn in range(230):
        state = chance.getstate()
        with block():
            found = odd(start.to(device), made)
            torchlazy.flush()
        chance.setstate(state)
        if turn % 20 == 0:
            torch.testing.assert_close(found.cpu(), odd(start, want))
        else:
            odd(start, want)
        rested.append(counts()["rested"])
    assert float(made) == float(want) == 230
    assert not rested[8] and rested[20] > 0, rested[:30]
    assert torchlazy.metrics()["fallbacks"][
        "native recorder: its traces do not come again: operators run unrecorded for a while"
    ]
    deferred, ways = counts()["deferred"], chance.choices([Tensor.sin, Tensor.neg, Tensor.tanh, Tensor.abs], k=400)
    for _ in range(500):
        with block():
            found = functools.reduce(lambda x, way: way(x), ways, start.to(device))
            torchlazy.flush()
        if counts()["deferred"] > deferred:
            break
    torch.testing.assert_close(found.cpu(), functools.reduce(lambda x, way: way(x), ways, start))
    assert counts()["deferred"] > deferred, "it rests for good"


@contextlib.contextmanager
def _compiled() -> Iterator[None]:
    """Inside, programs are compiled, and not stood in for."""
    parts = (driver.tiers, "look_up"), (driver.real(), "run_compiled")
    kept = [vars(owner).pop(name) for owner, name in parts]
    try:
        yield
    finally:
        for (owner, name), value in zip(parts, kept, strict=True):
            setattr(owner, name, value)


def test_runs_that_python_does_not_see_are_counted() -> None:
    """`metrics` had no kernels of programs that C++ runs on the CPU, and the demo's table said 0."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), torch.randn(4, 8)

    def step() -> float:
        with torchlazy.lazy_mode():
            value = model(x).square().sum()
            value.backward()
        return value.item()

    with _compiled():
        for _ in range(3):
            for _ in range(8):
                step()
            torchlazy.wait_for_compile()
        before = counts()["programs"]
        torchlazy.reset_metrics()
        for _ in range(5):
            step()
        metrics, programs = torchlazy.metrics(), counts()["programs"] - before
    assert programs >= 5 and metrics["hits"] == programs
    assert metrics["kernels"] >= 5 and sum(metrics["extern_calls"].values()) >= 5 and metrics["bytes"] > 0
    torchlazy.reset_metrics()
    assert not torchlazy.metrics()["hits"]


@pytest.mark.parametrize("is_final", [True, False])
def test_a_slow_program_is_given_up_and_told_once_it_is_what_it_will_be(
    monkeypatch: pytest.MonkeyPatch, is_final: bool
) -> None:
    """Before its CUDA graph was captured, a program lost to its operators for good, and nothing said so."""
    LIBRARY.module.for_tests(1, True)
    call = RunsInPython.__call__

    def slow(self: RunsInPython, *given: Any) -> Any:
        time.sleep(0.003)
        return call(self, *given)

    monkeypatch.setattr(RunsInPython, "__call__", slow)
    monkeypatch.setattr(RunsInPython, "is_final", lambda _: is_final)
    torchlazy.reset_metrics()
    x = torch.randn(8)
    for _ in range(40):
        with torchlazy.lazy_mode():
            y = (x + 1).sin().exp()
        assert_same(y, (x + 1).sin().exp())
    told = [reason for reason in torchlazy.metrics()["fallbacks"] if "not faster than its operators" in reason]
    assert (counts()["programs"] <= 14, len(told)) == (is_final, int(is_final))


def test_traces_that_take_turns_are_followed_whole() -> None:
    """They begin alike; only traces that do not come again as a whole end where they part."""
    weights, layers = [torch.randn(4, 4), torch.randn(2, 4)], [torch.randn(2, 4) for _ in range(260)]

    def begun(x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.relu(x @ weights[0]) * 0.5
        return x

    def step(x: Tensor) -> list[float]:
        first = begun(x)
        for _ in range(8):
            first = torch.tanh(first + weights[1])
        told = [float(first.sum())]
        second = begun(x)
        for weight in layers:
            second = torch.sin(second * weight)
        for _ in range(late):
            second = second + 1
        return [*told, float(second.sum())]

    for turn in range(20):
        x, late = torch.randn(2, 4), max(0, 1 - turn)  # the first one ends otherwise, as with an optimizer's state
        with torchlazy.lazy_mode():
            have = step(x)
        assert_same(have, step(x))
    causes = LIBRARY.module.causes()
    assert set(causes) == {"item"} and counts()["programs"] >= 20, (causes, counts())


CONSTANTS: dict[str, Callable[[float, Tensor], Tensor]] = {
    "floor_divide": lambda k, x: k // x,
    "remainder": lambda k, x: x % k,
    "pow": lambda k, x: x.abs() ** k,
    "gt": lambda k, x: (x > k) * 1.0,
    "masked_fill": lambda k, x: x.masked_fill(x > 0, k),
    "leaky_relu": lambda k, x: F.leaky_relu(x, k),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_constants_that_change_before_their_program_is_there(name: str, device: str) -> None:
    """The program is of the trace that was learned, and serves its numbers alone."""
    run = CONSTANTS[name]
    x = torch.tensor([2.0, 1.0, -2.0, 9.0])
    for k in (8.0, 8.0, 8.0, 1.5, 8.0, 1.5, 3.5, 1.5, 8.0):
        with torchlazy.lazy_mode() if device == "cpu" else contextlib.nullcontext():
            have = run(k, x.to(device) + 1)
        assert_same(have.cpu(), run(k, x + 1))
        torchlazy.wait_for_compile()


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_written_memory_that_nobody_keeps_at_first(device: str) -> None:
    """The program of a trace whose written input was gone at its end does not serve one where it is there."""
    kept: list[Tensor] = []

    def step(keeps: bool) -> Tensor | None:
        x = torch.arange(6.0, device=device)
        assert float(x.sum()) == 15
        for number in range(10):
            x.mul_(2).add_(number)
        return x if keeps else None

    for keeps in (False, False, False, False, True, True, False, True):
        with torchlazy.lazy_mode() if device == "cpu" else contextlib.nullcontext():
            found = step(keeps)
            torchlazy.flush()
        torchlazy.wait_for_compile()
        if found is not None:
            kept.append(found)
            assert found.tolist() == [1013 + 1024 * i for i in range(6)]
    assert counts()["programs"] >= 4 and len(kept) == 3


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_constants_before_the_place_where_traces_part(name: str, device: str) -> None:
    """A path that goes on where another ends serves the constants of its own program alone."""
    run = CONSTANTS[name]
    x = torch.tensor([2.0, 1.0, -2.0, 9.0])
    turns = [*[(8.0, 3)] * 3, *[(1.5, 0)] * 2, (1.5, 3), *[(3.5, 1)] * 3, (1.5, 1), (1.5, 3), (8.0, 0)]
    for k, more in turns * 2:

        def step(x: Tensor, k: float = k, more: int = more) -> Tensor:
            y = run(k, x + 1)
            for _ in range(more):
                y = y.sin()
            return y

        with torchlazy.lazy_mode() if device == "cpu" else contextlib.nullcontext():
            have = step(x.to(device))
        assert_same(have.cpu(), step(x))
