"""`float(loss)`, `int(t)`, `bool(t)` and `round` are replayed as `.item()` is, with their values, through each door."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy

CALLS = 24


def _make(read: Callable[[torch.Tensor], Any], device: str, seen: list[Any] | None = None) -> Any:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.05)

    def step(x: torch.Tensor) -> Any:
        loss = (weight * x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = read(loss.detach())
        if seen is not None:
            seen.append(value)
        return value

    return step


def _branches(loss: torch.Tensor) -> str:
    return "large" if float(loss) > 1.0 else "small"


def _counts(loss: torch.Tensor) -> tuple[int, torch.Tensor]:
    n = int(loss * 10)
    return n % 3, loss * n


def _asks(loss: torch.Tensor) -> tuple[bool, bool, float]:
    value = float(loss)
    return isinstance(value, float), isinstance(value, (int, str)), value


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda loss: float(loss),
    "int": lambda loss: int(loss * 100),
    "bool": lambda loss: bool(loss > 1.0),
    "round": lambda loss: round(float(loss), 2),
    "round of an item": lambda loss: round(loss.item(), 2),
    "int of an int": lambda loss: int((loss * 100).long()),
    "float of an int": lambda loss: float((loss * 100).long()),
    "math": lambda loss: math.exp(-float(loss)),
    "branch": _branches,
    "used again": _counts,
    "isinstance": _asks,
    "a scale": lambda loss: loss * float(loss),
}  # fmt: skip
DOORS = ("called", "module", "mode", "device")


def _doors(read: Callable[[torch.Tensor], Any], door: str) -> Any:
    step = _make(read, "lazy" if door == "device" else "cpu")
    if door != "module":
        return torchlazy.compile(step)

    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return step(x)

    return torchlazy.compile(Step())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("read", READS)
def test_conversions_are_replayed_with_their_values(read: str, door: str) -> None:
    plain, compiled = _make(READS[read], "cpu"), _doors(READS[read], door)
    for n in range(CALLS):
        x = torch.full((4,), 1.0 + 0.02 * n if n % 2 else 2.0 - 0.03 * n)
        wanted = plain(x)
        _same(_called(compiled, x, door), wanted)
    report = compiled.report()
    assert report.replays > report.captures, report
    assert "float" not in globals() and "int" not in globals()


def _called(compiled: Any, x: torch.Tensor, door: str) -> Any:
    if door == "mode":
        with torchlazy.lazy_mode():
            return compiled(x)
    return compiled(x.to("lazy") if door == "device" else x)


def _same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted) or isinstance(wanted, torch.Tensor)
    if isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            _same(one, other)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found.cpu(), wanted)
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=1e-5)
    else:
        assert found == wanted


def test_what_is_no_number_raises_as_in_eager() -> None:
    compiled, raised = torchlazy.compile(_make(READS["int"], "cpu")), 0
    for n in range(CALLS):
        x = torch.full((4,), math.nan if n % 6 == 5 else 0.5)
        plain = _make(READS["int"], "cpu")
        try:
            plain(x)
        except ValueError:
            raised += 1
            with pytest.raises(ValueError, match="NaN"):
                compiled(x)
            compiled = torchlazy.compile(_make(READS["int"], "cpu"))
        else:
            compiled(x)
    assert raised


def test_a_nan_after_replays_raises() -> None:
    compiled = torchlazy.compile(lambda x: int(x.sum()))
    for n in range(CALLS):
        assert compiled(torch.full((3,), n * 1.0)) == 3 * n
    assert compiled.report().replays
    with pytest.raises(ValueError, match="NaN"):
        compiled(torch.full((3,), math.nan))
    assert compiled(torch.full((3,), 4.0)) == 12


def test_texts_are_no_conversions() -> None:
    compiled = torchlazy.compile(lambda x, text: x * float(text) + int("10", 16) + int(x.shape[0]))
    for text in ("1.5", "1.5", "2.5", "1.5", "2.5", "2.5"):
        wanted = torch.full((3,), float(text) + 19)  # outside of the assertion, which pytest hands `float` on from
        assert torch.equal(compiled(torch.ones(3), text), wanted)


def test_code_that_hands_the_class_on_sees_the_builtin() -> None:
    space: dict[str, Any] = {"torch": torch}
    source = "def hands_on(x):\n    return torch.zeros(2, dtype=float) + float(x.sum()), {float: 1}[type(1.0)]\n"
    exec(source, space)
    compiled = torchlazy.compile(space["hands_on"])
    for n in range(6):
        made, one = compiled(torch.full((2,), n * 1.0))
        assert made.dtype is torch.float64 and made[0] == 2.0 * n and one == 1


@pytest.mark.filterwarnings("ignore:torchlazy.compile")
@pytest.mark.parametrize(
    "read", [lambda loss: f"{float(loss):.3f}", lambda loss: f"{loss:.3f}", lambda loss: str(loss.item())]
)
def test_texts_run_their_python_and_say_what_to_write(read: Callable[[torch.Tensor], Any]) -> None:
    plain, compiled = _make(read, "cpu"), torchlazy.compile(_make(read, "cpu"))
    for n in range(8):
        x = torch.full((4,), 1.0 + 0.1 * n)
        assert compiled(x)[:4] == plain(x)[:4]
    reason = next(reason for reason in compiled.report().reasons if reason.startswith("not replayed"))
    assert "outside of the call" in reason and f"{os.path.basename(__file__)}:{read.__code__.co_firstlineno}" in reason


_TABLE = (3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8)


def _elsewhere(body: str) -> Callable[[Any], int]:
    """A function of a module of its own."""
    space: dict[str, Any] = {}
    exec(f"def function(x):\n    return {body}\n", space)
    return space["function"]


_PLAIN_INT = _elsewhere("list(map(int, [x]))[0]")  # its module's code hands the builtin on: it gives plain numbers
_LEAST = _elsewhere("min(x, 4) if type(x) is int else -1")  # code that compares types gets plain numbers
# What is done with a count; whether one template, or one for each outcome or kind of size, serves all counts.
COUNTED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], bool]] = {
    "returned": (lambda x, n: int(n), True),
    "a scale": (lambda x, n: x * int(n) / 3, True),
    "a mean": (lambda x, n: (x.sum() / int(n), 1.0 / int(n)), True),
    "of an int again": (lambda x, n: int(min(int(n), 99)) + 1, True),
    "a remainder": (lambda x, n: x * (int(n) % 3), True),
    "rounded": (lambda x, n: round(int(n), -1), True),
    "rounded alone": (lambda x, n: round(int(n)), True),
    "a branch": (lambda x, n: x * 2 if int(n) > 5 else x * 3, True),
    "the least": (lambda x, n: x * min(int(n), 4), True),
    "a slice": (lambda x, n: x[: int(n)].sum(), True),
    "a slice to a difference": (lambda x, n: x[int(n) - 1 :].sum(), True),
    "an index": (lambda x, n: x[int(n) - 1], True),
    "a shape": (lambda x, n: x.new_ones(int(n), 2) * x[0], True),
    "expanded": (lambda x, n: x[:1].expand(int(n)).sum(), True),
    "a slice, and a place in a ring": (
        lambda x, n: (x[: int(n)].sum(), x.new_ones(12)[(int(n) + 2) % 8 :], x * ((int(n) - 1) % 4)), False
    ),
    "a range": (lambda x, n: x * sum(i == 9 for i in range(int(n) + 1)), False),
    "a table": (lambda x, n: x * _TABLE[int(n)], False),
    "a table by the tensor": (lambda x, n: x * _TABLE[n], False),
    "a text": (lambda x, n: f"{int(n)} of {x.shape[0]}", False),
    "a number of a text": (lambda x, n: x * min(4, len(f"{int(n) * 'a'}")), False),
    "bits": (lambda x, n: x * (int(n) & 3), False),
    "by the builtin": (lambda x, n: x * min(_PLAIN_INT(n), 4), False),
    "an item whose type is asked": (lambda x, n: x * _LEAST(n.item()), False),
    "an int whose type is asked": (lambda x, n: x * _LEAST(int(n)), False),
    "an item by the builtin": (lambda x, n: x * min(_PLAIN_INT(n.item()), 4), False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torchlazy.compile")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use", COUNTED)
def test_counts_that_vary(use: str, door: str) -> None:
    """Counts beyond those that were captured come later, and give what eager gives."""
    function, is_shared = COUNTED[use]

    class Counted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x, (x > 0).sum())

    counted = Counted()
    compiled = torchlazy.compile(counted if door == "module" else lambda x: counted(x), audit=False)
    counts = (4, 5, 7, 8, 6, 4, 5, 7, 9, 3, 10, 2, 6, 9, 3, 8)
    for n in counts * 2:
        x = torch.where(torch.arange(10) < n, 1.0, -1.0) * torch.linspace(0.5, 3, 10)
        wanted = function(x, (x > 0).sum())
        _same(_called(compiled, x, door), wanted)
    report = compiled.report()
    assert not report.alarm and (not is_shared or report.captures <= 4), report


def test_counts_among_the_arguments() -> None:
    """An integer tensor that is given: read before anything runs."""
    compiled = torchlazy.compile(lambda x, n: (x[: int(n) + 1].sum() * int(n), int(n) > 4))
    for n in (3, 5, 4, 6, 2, 7, 3, 6, 5, 4, 2, 7):
        x = torch.linspace(0, 1, 9)
        _same(compiled(x, torch.tensor(n)), (x[: n + 1].sum() * n, n > 4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool])
def test_kinds_of_integers(dtype: torch.dtype) -> None:
    compiled = torchlazy.compile(lambda x: (int(x.max()) * 2, [10, 20][int(x.any())]))
    for n in range(12):
        x = torch.tensor([0, n % 7]).to(dtype)
        _same(compiled(x), (int(x.max()) * 2, 20 if n % 7 else 10))


def test_an_int_that_needs_a_value_is_named_with_its_line() -> None:
    def count(x: torch.Tensor) -> int:
        return int((x > 0).sum())

    with pytest.raises(torchlazy.SyncInside, match=f"{os.path.basename(__file__)}:{count.__code__.co_firstlineno + 1}"):
        torchlazy.compile(count, fullgraph=True)(torch.ones(3))


_MADE: dict[str, Callable[[int], Any]] = {
    "beyond int64": lambda k: torch.tensor(k * 2**70),
    "beyond int64, in a list": lambda k: torch.tensor([k * 2**70]),
    "some beyond int64": lambda k: torch.as_tensor(k * 2**62),
    "below int64": lambda k: torch.tensor(-k * 2**63),
    "beyond int64, as floats": lambda k: torch.tensor(k * 2**70, dtype=torch.float32),
    "beyond floats": lambda k: torch.tensor(k * 1e40),
    "bytes": lambda k: torch.tensor(k * 100, dtype=torch.uint8),
    "bytes of floats": lambda k: torch.tensor(k * 100.5, dtype=torch.uint8),
    "truths": lambda k: torch.tensor(k - 2, dtype=torch.bool),
    "a positional dtype": lambda k: torch.as_tensor(k * 2, torch.float64),
}


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("name", _MADE)
def test_tensors_of_numbers_out_of_range(name: str, device: str) -> None:
    def step(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, _MADE[name](k)

    def seen(run: Any, k: int, device: str) -> Any:
        try:
            made = run(torch.ones(1, device=device), k)[1]
        except Exception as error:
            return type(error), str(error).replace("uint8_t", "uint8")
        return made.dtype, made.item()

    run = torchlazy.compile(step)
    for k in (1, 1, 2, 2, 3, 1, 4, 5, 1):
        assert seen(run, k, device) == seen(step, k, "cpu"), k
