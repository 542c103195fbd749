"""Exported programs: the same results as the function, whatever it is made of; its state, sizes, guards and errors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.export.front_door import ExportError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
REFUSED = (AssertionError, RuntimeError, ValueError, TypeError)  # torch's own errors of guards and structures


def module_of(*args: Any, **kwargs: Any) -> nn.Module:
    """The exported program as a module."""
    return torchlazy.export(*args, **kwargs).module()


def bounds(program: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """The bounds of each size in the program's constraints."""
    ends = {str(name): (r.lower, r.upper) for name, r in program.range_constraints.items()}
    return {name: (int(low), None if "int_oo" in str(high) else int(high)) for name, (low, high) in ends.items()}


def agree(exported: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The same values, dtypes and strides from both, for copies of the arguments."""
    mine, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
    with torch.no_grad():
        want = fn(*theirs[0], **theirs[1])
    got = exported(*mine[0], **mine[1])
    tensors = [got, want] if isinstance(got, torch.Tensor) else [*_tensors(got), *_tensors(want)]
    half = len(tensors) // 2
    assert half and len(tensors) == 2 * half
    for a, b in zip(tensors[:half], tensors[half:], strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    torch.testing.assert_close(_tensors(mine), _tensors(theirs))  # written arguments


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.position = nn.Embedding(64, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        x = x + self.position(torch.arange(length, device=x.device))
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        if mask is not None:
            scores = scores + mask[:, None, None, :]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.out(mixed)


# ---------------------------------------------------------------- functions and their arguments


def test_a_function() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).softmax(-1)[:, 1:].t()

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    exported = module_of(fn, (x, y))
    agree(exported, fn, torch.randn(3, 4), torch.randn(4, 5))
    agree(exported, fn, torch.randn(4, 3).t(), torch.randn(4, 10)[:, ::2])  # other layouts are brought into order


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    weight: float = 1.0


def test_containers_of_arguments_and_results() -> None:
    def fn(batch: Any, pair: Pair, *rest: Any, scale: float = 1.0, **options: Any) -> Any:
        left = pair.left * scale + batch["ids"][0] * batch["w"]
        return {"left": left, "pair": Pair(left + rest[0], None), "items": [rest[1].sum(), 3, "name", options["bias"]]}

    given = ({"ids": [torch.ones(3), None], "w": 2.0}, Pair(torch.randn(3), 4), torch.randn(3), torch.randn(2, 2))
    named = {"scale": 0.5, "bias": torch.randn(2)}
    exported = module_of(fn, given, named)
    plain = (given[0], tuple(given[1]), *given[2:])  # a named tuple's class is the program's code
    got, want = exported(*plain, **named), fn(*given, **named)
    assert list(got) == list(want) and type(got["pair"]) is tuple and got["pair"][1] is None
    assert got["items"][1:3] == [3, "name"]
    torch.testing.assert_close(_tensors(got), _tensors(want))


def test_a_result_that_is_an_argument_or_a_constant() -> None:
    table = torch.arange(4.0)

    def fn(x: torch.Tensor) -> Any:
        return x, x.view(-1), table, torch.tensor([1.0, 2.0]), x.detach()

    exported = module_of(fn, (torch.randn(2, 2),))
    agree(exported, fn, torch.randn(2, 2))


def test_what_is_a_number_is_checked() -> None:
    exported = module_of(lambda x, n, flag: x * n if flag else x, (torch.ones(2), 3, True))
    assert exported(torch.ones(2), 3, True).tolist() == [3.0, 3.0]
    with pytest.raises(REFUSED, match="n == 3"):
        exported(torch.ones(2), 4, True)
    with pytest.raises(REFUSED, match="flag"):
        exported(torch.ones(2), 3, False)


def test_autocast_is_in_the_graph() -> None:
    layer = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).float()

    exported = module_of(fn, (torch.randn(2, 4),))
    agree(exported, fn, torch.randn(2, 4))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode(context: Any) -> None:
    model = ConvNet().eval()
    x = torch.randn(2, 3, 8, 8)
    with context():
        exported = module_of(model, (x,))
    agree(exported, model, x)


# ---------------------------------------------------------------- state


def test_a_module() -> None:
    model = ConvNet().eval()
    exported = module_of(model, (torch.randn(2, 3, 8, 8),))
    assert set(exported.state_dict()) == {k for k in model.state_dict() if k != "norm.num_batches_tracked"}
    assert {k for k, _ in exported.named_parameters()} == {k for k, _ in model.named_parameters()}
    assert not any(p.requires_grad for p in exported.parameters())
    agree(exported, model, torch.randn(2, 3, 8, 8))


def test_running_statistics_are_updated_state() -> None:
    model = ConvNet().train()
    exported = module_of(model, (torch.randn(4, 3, 8, 8),))
    other = copy.deepcopy(model)
    for _ in range(3):
        agree(exported, other, torch.randn(4, 3, 8, 8))
        for key, value in other.named_buffers():
            torch.testing.assert_close(exported.get_buffer(key), value)
    assert model.norm.num_batches_tracked == 0  # the module itself is as before


def test_arguments_that_are_written_to() -> None:
    def fn(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        before = cache.sum()
        cache[1:3] += x
        x.mul_(2)
        return before + cache.sum()

    exported = module_of(fn, (torch.randn(2, 3), torch.randn(4, 3)))
    agree(exported, fn, torch.randn(2, 3), torch.randn(4, 3))
    agree(exported, fn, torch.randn(3, 2).t(), torch.randn(8, 3)[::2])


def test_two_arguments_that_change_places() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a - b

    exported = module_of(fn, (torch.randn(3), torch.randn(3)))
    agree(exported, fn, torch.randn(3), torch.randn(3))


def test_modules_are_found_where_functions_keep_them() -> None:
    model = ConvNet().eval()
    x = torch.randn(2, 3, 8, 8)

    def closure(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2

    def argument(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x) * 2

    for fn, args, key in (
        (closure, (x,), "model.head.weight"),
        (model.forward, (x,), "head.weight"),
        (functools.partial(argument, model), (x,), "arg0.head.weight"),
    ):
        exported = module_of(fn, args)
        assert key in exported.state_dict()
        agree(exported, fn, torch.randn(2, 3, 8, 8))
    exported = module_of(argument, (model, x))
    assert "net.head.weight" in exported.state_dict()
    torch.testing.assert_close(exported(x), argument(model, x))  # the module is state, no argument


def test_a_module_that_is_called_like_a_method() -> None:
    half = nn.Linear(2, 2)
    exported = module_of(lambda x: half(x), (torch.ones(1, 2),))
    assert "half_.weight" in exported.state_dict()
    agree(exported, half, torch.randn(1, 2))


def test_tied_weights_are_one_state() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = Tied()
    exported = module_of(model, (torch.arange(3),))
    assert len(exported.state_dict()) == 1
    agree(exported, model, torch.tensor([7, 0, 9]))


def test_a_buffer_that_is_replaced() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x + self.count

    model = Counter()
    exported = module_of(model, (torch.zeros(2),))
    assert [exported(torch.zeros(2))[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert model.count == 0


def test_a_training_step_by_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        return loss.detach()

    exported = module_of(step, (torch.randn(6, 4), torch.randn(6, 2)), dynamic=({0: "n"}, {0: "n"}))
    for size in (6, 9, 3):
        x, y = torch.randn(size, 4), torch.randn(size, 2)
        torch.testing.assert_close(exported(x, y), step(x, y))
        for key, value in model.named_parameters():
            torch.testing.assert_close(exported.state_dict()[f"model.{key}"], value.detach())


def test_random_numbers_follow_the_seed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    x = torch.randn(8, 64)
    state = torch.get_rng_state()
    exported = module_of(model, (x,))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    first, second = exported(x), exported(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(exported(x), first)
    assert 0.4 < (first == 0).float().mean() < 0.6
    kept = first != 0
    torch.testing.assert_close(first[kept], (model[0](x).detach() * 2)[kept])


def test_a_checkpoint_draws_the_same_numbers_again() -> None:
    drop = nn.Dropout(0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False)
        return loss, torch.autograd.grad(loss.sum(), x)[0]

    value, gradient = module_of(step, (torch.ones(64),))(torch.ones(64))
    assert torch.equal(value, gradient) and 0 < (value == 0).sum() < 64


def test_every_distribution_draws_without_our_operators() -> None:
    def fn(p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.rand(4000), torch.randn(4000), torch.randint(0, 7, (4000,)), torch.bernoulli(p),
            torch.empty(4000).exponential_(2.0), torch.multinomial(torch.ones(5), 4000, replacement=True),
        )  # fmt: skip

    program = torchlazy.export(fn, (torch.full((4000,), 0.25),))
    assert not any("torchlazy" in str(node.target) for node in program.graph.nodes)
    module = program.module()
    uniform, normal, whole, coin, exponential, drawn = module(torch.full((4000,), 0.25))
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.03
    assert abs(normal.mean()) < 0.08 and abs(normal.std() - 1) < 0.06
    assert set(whole.tolist()) == set(range(7)) and set(drawn.tolist()) == set(range(5))
    assert abs(coin.mean() - 0.25) < 0.04 and abs(exponential.mean() - 0.5) < 0.05
    with pytest.raises(RuntimeError, match="expects each p"):
        module(torch.full((4000,), 2.0))


def test_a_model_on_the_lazy_device() -> None:
    model = ConvNet().to("lazy").eval()
    x = torch.randn(2, 3, 8, 8, device="lazy")
    exported = module_of(model, (x,), dynamic={"x": {0: "batch"}})
    plain = copy.deepcopy(model).cpu()
    fresh = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(exported(fresh), plain(fresh))
    torch.testing.assert_close(model(x).cpu(), plain(x.cpu()))  # and it still computes


# ---------------------------------------------------------------- sizes


def test_a_batch_that_varies() -> None:
    model = ConvNet().eval()
    program = torchlazy.export(model, (torch.randn(4, 3, 8, 8),), dynamic={"x": {0: "batch"}})
    assert list(bounds(program).values()) == [(1, None)]
    exported = program.module()
    for batch in (1, 2, 4, 17):
        agree(exported, model, torch.randn(batch, 3, 8, 8))


def test_a_batch_of_one_where_layouts_differ() -> None:
    """A linear layer of a transposed input adds its bias within the product at a batch of one only."""
    layer = nn.Linear(6, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer(x.transpose(0, 1)).relu().transpose(0, 1)

    exported = module_of(fn, (torch.randn(3, 5, 6),), dynamic={"x": {0: "batch"}})
    for batch in (1, 2, 9):
        agree(exported, fn, torch.randn(batch, 5, 6))


def test_pictures_of_any_size() -> None:
    model = ConvNet().eval()
    exported = module_of(model, (torch.randn(4, 3, 8, 8),), dynamic={"x": {0: "n", 2: "h", 3: "w"}})
    for shape in ((4, 8, 8), (1, 9, 30), (3, 64, 5), (2, 33, 33)):
        agree(exported, model, torch.randn(shape[0], 3, *shape[1:]))


def test_batch_and_length_of_attention() -> None:
    model = Attention()
    exported = module_of(
        model,
        (torch.randn(2, 10, 16),),
        {"mask": torch.zeros(2, 10)},
        dynamic={"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}},
    )
    for batch, length in ((2, 10), (1, 64), (5, 3), (7, 33)):
        agree(exported, model, torch.randn(batch, length, 16), mask=torch.randn(batch, length))
    with pytest.raises(REFUSED, match="Guard failed"):
        exported(torch.randn(2, 3, 16), mask=torch.zeros(2, 4))
    with pytest.raises(REFUSED, match="Guard failed"):
        exported(torch.randn(2, 3, 16), mask=torch.zeros(3, 3))


def test_forms_of_sizes() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2) + y[:-1].unsqueeze(1)

    x, y = torch.randn(8), torch.randn(5)
    batch = torch.export.Dim("batch", min=2, max=64)
    for dynamic in ({"x": {0: "2*n"}, "y": {0: "n + 1"}}, ({0: 2 * batch}, {0: batch + 1})):
        exported = module_of(fn, (x, y), dynamic=dynamic)
        for n in (2, 4, 15):
            agree(exported, fn, torch.randn(2 * n), torch.randn(n + 1))
        with pytest.raises(REFUSED, match="Guard failed"):
            exported(torch.randn(7), y)
    with pytest.raises(REFUSED, match=r"Guard failed: .* <= 128"):
        exported(torch.randn(130), torch.randn(66))


def test_hints_of_torch_export() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y

    hint = torch.export.Dim
    exported = module_of(fn, (torch.randn(3, 4), torch.randn(5)), dynamic={"x": {0: hint.AUTO}, "y": (hint.DYNAMIC,)})
    agree(exported, fn, torch.randn(9, 4), torch.randn(2))
    with pytest.raises(REFUSED, match=r"x.*4"):
        exported(torch.randn(3, 5), torch.randn(5))


def test_a_size_that_must_be_even() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] // 2, 2, -1).sum(1)

    exported = module_of(fn, (torch.randn(8, 3),), dynamic={"x": {0: "n"}})
    for n in (4, 8, 50):
        agree(exported, fn, torch.randn(n, 3))
    with pytest.raises(REFUSED, match=r"Guard failed: .* == 0"):
        exported(torch.randn(7, 3))


def test_sizes_below_the_example_where_it_is_the_largest() -> None:
    model = Attention()
    exported = module_of(model, (torch.randn(2, 64, 16),), dynamic={"x": {1: "length"}})
    for length in (64, 63, 5):
        agree(exported, model, torch.randn(2, length, 16))


def test_thresholds_of_sizes_become_bounds() -> None:
    """The far end is looked at, and the last size that is the same program found."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[: min(x.shape[0], 1000)] * 2

    program = torchlazy.export(fn, (torch.ones(8),), dynamic={"x": {0: "n"}})
    exported = program.module()
    assert [high for _, high in bounds(program).values()] == [1000]
    agree(exported, fn, torch.randn(1000))
    with pytest.raises(REFUSED, match="1000"):
        exported(torch.randn(1001))
    with pytest.raises(ExportError, match=r"the bounds of 'n' include 4096.*\n?.*torch.export.Dim\('n', max=1000\)"):
        torchlazy.export(fn, (torch.ones(8),), dynamic={"x": {0: torch.export.Dim("n", max=4096)}})

    def padded(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] >= 6 else x * 3

    program = torchlazy.export(padded, (torch.ones(8),), dynamic={"x": {0: "n"}})
    assert list(bounds(program).values()) == [(6, None)]
    with pytest.raises(REFUSED, match="6"):
        program.module()(torch.ones(5))
    positions = torch.randn(64, 3)
    program = torchlazy.export(lambda x: x + positions[: len(x)], (torch.randn(10, 3),), dynamic={"x": {0: "n"}})
    assert [high for _, high in bounds(program).values()] == [64]


def test_numbers_that_move_with_sizes() -> None:
    def fn(x: torch.Tensor) -> Any:
        n, m = x.shape
        scaled = x / n + x * (1.0 / m) - x * (m**-0.5) + x.sum() * (0.5 * n)
        return scaled, n * m, x.mean(0), torch.arange(n) * m, torch.full((m,), 1.0 / n), n

    exported = module_of(fn, (torch.randn(4, 6),), dynamic={"x": {0: "n", 1: "m"}})
    for shape in ((4, 6), (3, 5), (11, 2), (2, 31)):
        x = torch.randn(shape)
        agree(exported, fn, x)
        assert exported(x)[1] == shape[0] * shape[1] and exported(x)[5] == shape[0]


def test_writes_into_windows_of_varying_size() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0] + 2, x.shape[1] * 2)
        out[1:-1, ::2] = x
        out[1:-1, 1::2] = x.flip(0)
        return out.t()

    exported = module_of(fn, (torch.randn(4, 5),), dynamic={"x": {0: "n", 1: "m"}})
    for shape in ((4, 5), (2, 9), (12, 3)):
        agree(exported, fn, torch.randn(shape))


def test_channels_last_stays() -> None:
    model = ConvNet().eval()
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    exported = module_of(nn.Sequential(model.conv, model.norm), (x,), dynamic={"input": {0: "n"}})
    fresh = torch.randn(6, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    agree(exported, nn.Sequential(model.conv, model.norm), fresh)
    torch.testing.assert_close(exported(fresh.contiguous()), exported(fresh))


SIZES_THAT_DO_NOT_GENERALISE = {
    "takes another path at": lambda x: x.sin() if x.shape[0] < 8 else x.cos(),
    "another number of calls": lambda x: functools.reduce(lambda a, i: a + x[i], range(x.shape[0]), x[0]),
    "Python numbers that depend on a size": lambda x: x * torch.tensor([x.shape[0] * 1.0]),
    "no expression was found": lambda x: x * float(math.factorial(min(x.shape[0], 20))),
    "does not run at other sizes of 'n' than 4": lambda x: x + torch.ones(4, 3),
}


@pytest.mark.parametrize("text", list(SIZES_THAT_DO_NOT_GENERALISE))
def test_what_does_not_generalise_is_told(text: str) -> None:
    fn = SIZES_THAT_DO_NOT_GENERALISE[text]
    torchlazy.export(fn, (torch.randn(4, 3),))
    with pytest.raises(ExportError, match=text):
        torchlazy.export(fn, (torch.randn(4, 3),), dynamic={"x": {0: "n"}})


@pytest.mark.parametrize(
    "dynamic, text",
    [
        ({"z": {0: "n"}}, "dynamic names 'z'; the tensors among the arguments are x, y"),
        ({"x": {5: "n"}}, "dynamic names dimension 5 of x, which has 2"),
        ({"x": {0: "n"}, "y": {1: "n"}}, "dimension 1 of y is 5, but n is 4 by the other arguments"),
        ({"x": {0: "3*n"}}, "dimension 0 of x is 4, but 4 is not"),
        ({"x": {0: "n**2"}}, "write \"batch\""),
        ({"x": {0: torch.export.Dim("n", max=3)}}, "n is 4 in the example, outside of its own bounds"),
        ({"x": {1: "a"}, "y": {1: "b"}}, "sizes that must be equal need one name"),
    ],
)  # fmt: skip
def test_wrong_wishes_are_told(dynamic: Any, text: str) -> None:
    with pytest.raises(ExportError) as caught:
        torchlazy.export(lambda x, y: x.sum(0) + y.sum(0), (torch.randn(4, 5), torch.randn(2, 5)), dynamic=dynamic)
    assert text in str(caught.value)


# ---------------------------------------------------------------- what is no whole graph

_outside = torch.zeros(3)
_count = torch.zeros(())


class Stash(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return self.last


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def _write_outside(x: torch.Tensor) -> torch.Tensor:
    _outside.add_(x)
    return x * 2


def _count_outside(x: torch.Tensor) -> torch.Tensor:
    _count.add_(1)
    return x * 2


def _backward(x: torch.Tensor) -> torch.Tensor:
    (_layer(x)).sum().backward()
    return x * 1


_layer = nn.Linear(3, 3)
NO_WHOLE_GRAPHS: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x * x.sum().item(), "'item' needs a value on the host"),
    (lambda x: x * float(x.sum()), "'float' needs a value on the host"),
    (_branch, "'bool' needs a value on the host"),
    (lambda x: (print(x + 1), x)[1], "needs a value on the host"),
    (lambda x: (x + 1).numpy(), "'numpy' needs a value on the host"),
    (lambda x: x.tolist(), "'tolist' needs a value on the host"),
    (lambda x: x[x > 0], "data-dependent shape"),
    (lambda x: (x + 1).nonzero(), "nonzero has to run for real: data-dependent shape"),
    (_write_outside, "writes to a tensor of float32[3] that is neither an argument"),
    (_count_outside, "writes to a number in ordinary memory"),
    (_backward, "leaves a gradient in _layer.weight.grad"),
    (Stash(), "stores a tensor in the attribute last"),
    (lambda x: torch.rand(3, generator=torch.Generator().manual_seed(1)) + x, "a generator of the program's own"),
    (lambda x: object(), "the result is a object"),
    (lambda x: (x * 2).to_sparse(), "has to run for real"),
]


@pytest.mark.parametrize("fn, text", NO_WHOLE_GRAPHS)
def test_what_is_no_whole_graph_is_told(fn: Callable[..., Any], text: str) -> None:
    outside, count = _outside.clone(), _count.clone()
    x = torch.ones(3)
    with pytest.raises(ExportError) as caught:
        torchlazy.export(fn, (x,))
    assert text in str(caught.value)
    if "where:" in str(caught.value):
        assert "test_export.py:" in str(caught.value)
    assert torch.equal(x, torch.ones(3)) and torch.equal(outside, _outside) and torch.equal(count, _count)
    assert _layer.weight.grad is None and type(_layer.weight) is nn.Parameter
    assert torch.equal((torch.ones(2, device="lazy") + 1).cpu(), torch.full((2,), 2.0))  # the recorder goes on


def test_the_line_of_a_sync() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y if y.max() > 1 else x  # here

    with pytest.raises(ExportError) as caught:
        torchlazy.export(inner, (torch.ones(3),))
    line = inner.__code__.co_firstlineno + 2
    assert f"test_export.py:{line}" in str(caught.value)


def test_nothing_is_run_or_changed() -> None:
    model = ConvNet().train()
    before = {k: (id(v), v.clone()) for k, v in (*model.named_parameters(), *model.named_buffers())}
    attributes = dict(model.__dict__)
    x = torch.randn(2, 3, 8, 8)
    pending = torch.ones(3, device="lazy") * 2
    torchlazy.reset_metrics()
    kept: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.append(model(x))
        return kept[-1] * 2

    torchlazy.export(fn, (x,), dynamic={"x": {0: "n"}})
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert {k: id(v) for k, v in after.items()} == {k: i for k, (i, _) in before.items()}
    for key, (_, value) in before.items():
        assert torch.equal(after[key], value)
    assert model.__dict__ == attributes
    assert pending.tolist() == [2.0, 2.0, 2.0]
    assert sum(torchlazy.metrics()["cuts"].values()) <= 2  # what was pending before
    with pytest.raises(ExportError, match="a recording that was never run"):
        kept[0].sum().item()


def test_wrong_calls_of_export() -> None:
    with pytest.raises(TypeError, match="args is a tensor; pass a tuple"):
        torchlazy.export(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="argument kind is a dtype"):
        torchlazy.export(lambda x, kind: x.to(kind), (torch.ones(2), torch.float64))
    with pytest.raises(ExportError, match="the result is a device"):
        torchlazy.export(lambda x: [x, x.device], (torch.ones(2),))
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        torchlazy.export(lambda x, y: x, (torch.ones(2),))
    with pytest.raises(ExportError, match="argument x is a object"):
        torchlazy.export(lambda x: 1, (object(),))
    with pytest.raises(ExportError, match="shares memory with b"):
        x = torch.ones(4)
        torchlazy.export(lambda a, b: a.add_(b), (x, x[:]))
