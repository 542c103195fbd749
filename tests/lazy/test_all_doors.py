"""Calls of torch's that eager takes, or refuses: so does each door, at the same line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

Program = Callable[[str], Any]
pytestmark = pytest.mark.usefixtures("operator_by_operator")
DOORS = ("lazy", "lazy_mode", "compile", "compile lazy")


def through(door: str, program: Program) -> Any:
    """What a program gives behind a door; a compiled one at its third call."""
    device = "lazy" if door.endswith("lazy") else "cpu"
    if door.startswith("compile"):
        compiled = torchlazy.compile(program)
        return [compiled(device) for _ in range(3)][-1]
    with torchlazy.lazy_mode() if door == "lazy_mode" else contextlib.nullcontext():
        return program(device)


def same(mine: Any, eager: Any) -> None:
    if isinstance(eager, (tuple, list)):
        for one, other in zip(mine, eager, strict=True):
            same(one, other)
    elif isinstance(eager, torch.Tensor):
        mine = mine.cpu()
        assert mine.requires_grad == eager.requires_grad
        torch.testing.assert_close(mine.detach(), eager.detach(), rtol=1e-5, atol=1e-5, check_stride=True)
    else:
        assert mine == eager


def _scores(device: str) -> torch.Tensor:
    return torch.linspace(-2, 3, 1000, device=device).view(50, 20).sin().log_softmax(-1)


def _symbols(device: str) -> torch.Tensor:
    return torch.arange(30, device=device) % 19 + 1


def _ctc(device: str, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    return F.ctc_loss(_scores(device), _symbols(device), torch.full(shape, 50), torch.full(shape, 30), **options)


def _shuffled(device: str, *shape: int, of: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    x = torch.ones(shape, device=device).to(memory_format=of).requires_grad_()
    return torch.native_channel_shuffle(x, 3)


def _sparse(device: str, *args: Any, **options: Any) -> Any:
    found = torch.sparse_coo_tensor(*args, **options)
    return found.shape, found.is_coalesced(), found.to_dense().cpu()


def _sparse_gradient(device: str) -> torch.Tensor:
    x = torch.ones(2, device=device, requires_grad=True)
    torch.sparse_coo_tensor(torch.tensor([[0, 3]], device=device) + 1, x * 3).to_dense().square().sum().backward()
    assert x.grad is not None
    return x.grad


def _checked(device: str, *size: tuple[int, ...], place: int = 1) -> Any:
    where = torch.tensor([[0, place]], device=device) + 0
    return _sparse(device, where, torch.ones(2, device=device), *size, check_invariants=True)


def _made_of_read(device: str) -> Any:
    """Tensors that C++ makes of numbers of recorded tensors."""
    x = torch.arange(3.0, device=device) + 1
    loss, count = (x * 2).sum(), (x > 1).sum(dtype=torch.int16)
    made = torch.tensor([loss, 2.0]), torch.as_tensor([[loss], [loss + 1]]), torch.asarray([loss]), x.new_tensor([loss])
    return (
        *made,
        torch.tensor([count, 3]),
        torch.tensor([count > 1]),
        torch.tensor([loss * 1j]),
        torch.FloatTensor([loss]),
    )


def _called_for_each(device: str) -> Any:
    """Methods that call Python's functions with each element, of recorded and of ordinary tensors."""
    x, plain = torch.arange(3.0, device=device) + 1, torch.zeros(3)
    part, bias = x[1:], (x * 2).sum()
    x.map_(x * 2, lambda a, b: a + b * float(bias))
    whole = (x * 1).long().map2_(x.long(), x.long(), lambda a, b, c: a * b - c)
    plain.map_(torch.ones(1), lambda a, b: a + b)
    return x, part, part * 2, whole, plain, plain * 2


def _called_on_the_host(device: str) -> Any:
    x, plain = torch.arange(3.0) + 1, torch.zeros(3)
    return (x * 2).apply_(lambda a: a + 1), plain.apply_(lambda a: a + 4), plain + 1


def _refused_for_gradients(device: str) -> Any:
    x = torch.ones(3, device=device).requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        (x * 1).map_(x, lambda a, b: a)
    return x


def _traced(device: str) -> Any:
    x = torch.arange(3.0, device=device) * 2
    function = torch.jit.trace(lambda a: a * 2 + 1, (x,))
    return function(x), function(x + 1)


def _shown_after_a_write(device: str) -> str:
    base = torch.ones(2, device=device).requires_grad_() * 1
    with torch.no_grad():
        view = base[:1]
        view.mul_(2)
    return repr(view).replace(", device='lazy'", "")


TAKEN: dict[str, Program] = {
    "made of numbers that are read": _made_of_read,
    "called for each element": _called_for_each,
    "called for each element of the host": _called_on_the_host,
    "called for each element, with gradients": _refused_for_gradients,
    "traced by torch.jit": _traced,
    "a view shown after a write without gradients": _shown_after_a_write,
    "ctc: lengths without dimensions": lambda d: _ctc(d, ()),
    "ctc: lengths without dimensions, each loss": lambda d: _ctc(d, (), reduction="none"),
    "ctc: a list of lengths": lambda d: _ctc(d, (1,)),
    "shuffled: no rows": lambda d: _shuffled(d, 0, 6, 2, 2),
    "shuffled: no rows, channels last": lambda d: _shuffled(d, 0, 6, 2, 2, of=torch.channels_last),
    "shuffled: no channels": lambda d: _shuffled(d, 2, 0, 2),
    "shuffled: no columns": lambda d: _shuffled(d, 2, 6, 0),
    "shuffled": lambda d: _shuffled(d, 2, 6, 2),
    "sparse": lambda d: _sparse(d, torch.zeros(1, 1, device=d), torch.ones(1, device=d)),
    "sparse: blocks": lambda d: _sparse(d, torch.tensor([[2, 0], [0, 1]], device=d) + 1, torch.ones(2, 3, device=d)),
    "sparse: no entries": lambda d: _sparse(d, torch.zeros(2, 0, device=d), torch.ones(0, 3, device=d)),
    "sparse: lists": lambda d: _sparse(d, [[0, 1]], [3.0, 4.0]),
    "sparse: one value": lambda d: _sparse(d, torch.zeros(2, 1, device=d), torch.tensor(3.0, device=d)),
    "sparse: a gradient": _sparse_gradient,
    "sparse: checked": lambda d: _checked(d),
    "sparse: checked, of a size": lambda d: _checked(d, (5,)),
}


def _long(device: str, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _recurrent(device: str, batch_first: bool, dtype: torch.dtype) -> Any:
    layer = torch.nn.LSTM(3, 5, batch_first=batch_first, dtype=dtype, device=device)
    return layer(torch.zeros((4, 0, 3) if batch_first else (0, 4, 3), dtype=dtype, device=device))


REFUSED: dict[str, Program] = {
    "recurrent: no steps": lambda d: _recurrent(d, False, torch.float32),
    "recurrent: no steps, batch first": lambda d: _recurrent(d, True, torch.float32),
    "recurrent: no steps, doubles": lambda d: _recurrent(d, False, torch.float64),
    "written: positions of two lengths": lambda d: torch.zeros(3, 3, device=d).__setitem__(([0, 1], [0, 1, 2]), 0),
    "written: positions of two lengths, a slice between": lambda d: torch.zeros(3, 3, 3, device=d).__setitem__(
        (_long(d, 0, 1), slice(None), _long(d, 0, 1, 2)), 1.0
    ),
    "added: positions of two lengths": lambda d: torch.zeros(3, 3, device=d).index_put(
        [_long(d, 0, 1), _long(d, 0, 1, 2)], torch.ones((), device=d), True
    ),
    "put: no positions": lambda d: torch.ones([], device=d).index_put([], torch.ones(1, device=d), True),
    "put: no positions, a fitting value": lambda d: torch.ones(3, device=d).index_put([], torch.ones(3, device=d)),
    "put inside: positions of two lengths": lambda d: torch.ops.aten._index_put_impl_(
        torch.zeros(3, 3, device=d), [_long(d, 0, 1), _long(d, 0, 1, 2)], torch.ones((), device=d)
    ),
    "put: fewer values than positions": lambda d: torch.zeros(3, device=d).put(_long(d, 0, 1), torch.ones(1, device=d)),
    "put in place: more values": lambda d: torch.zeros(3, device=d).put_(_long(d, 0, 1), torch.ones(3, device=d)),
    "index_reduce: more rows than positions": lambda d: torch.zeros(3, 3, device=d).index_reduce(
        0, _long(d, 0, 1), torch.zeros(3, 3, device=d), "amax"
    ),
    "shuffled: channels that no group divides": lambda d: _shuffled(d, 0, 5, 2),
    "shuffled: no groups": lambda d: torch.native_channel_shuffle(torch.ones(0, 6, 2, device=d), 0),
    "sparse: a negative index": lambda d: _sparse(d, torch.zeros(1, 1, device=d) - 1, torch.ones(1, device=d)),
    "sparse: indices in a row": lambda d: _sparse(d, torch.zeros(2, device=d), torch.ones(2, device=d)),
    "sparse: checked, beyond its size": lambda d: _checked(d, (5,), place=7),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, door: str) -> None:
    same(through(door, TAKEN[name]), TAKEN[name]("cpu"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_call(name: str, door: str) -> None:
    with pytest.raises(Exception) as eager:
        REFUSED[name]("cpu")
    went_on = []

    def program(device: str) -> None:
        REFUSED[name](device)
        went_on.append(device)

    with pytest.raises(Exception) as mine:
        through(door, program)
    assert mine.type is eager.type, f"{mine.value!r}, eager: {eager.value!r}"
    assert not went_on, "raised later than at the call"


def test_lengths_without_dimensions_behind_torchs_own_capture() -> None:
    program = TAKEN["ctc: lengths without dimensions"]
    same(torch.compile(program, backend="torchlazy")("cpu"), program("cpu"))


def _both(device: str, known: int = 0) -> Any:
    """A tensor first and one of a class with its own rules second, also where the operators have been recorded."""

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.nn.functional.linear(x, y), torch.cat([x, y]), torch.where(x > 0, y, x), x * 2 + y

    x = torch.arange(4.0, device=device).view(2, 2).requires_grad_()
    for _ in range(known):
        [found.tolist() for found in step(x, x)]
    for _ in range(2):  # torch asks otherwise once an operator was answered so
        found = step(x, TwoTensor(x.detach(), x.detach() + 1))
    sum(one.sum() for one in found).backward()
    assert x.grad is not None and all(type(one) is TwoTensor for one in found)
    return [(one.a.cpu().detach(), one.b.cpu().detach()) for one in (*found, x.grad)]


@pytest.mark.parametrize("known", [0, 4])
@pytest.mark.parametrize("door", DOORS)
def test_classes_with_their_own_rules_answer(door: str, known: int) -> None:
    same(through(door, lambda device: _both(device, known)), _both("cpu"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["conj", "real", "imag"])
def test_primitives_of_complex_tensors(door: str, name: str) -> None:
    def program(device: str) -> Any:
        z = torch.tensor([1 + 2j, -3j], device=device)
        primitive = getattr(torch.ops.prims, name)
        return primitive(z).clone(), primitive(z * 2) + 1, getattr(torch._refs, name)(z.reshape(1, 2)) * 3

    same(through(door, program), program("cpu"))
