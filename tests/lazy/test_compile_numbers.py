"""Numbers that vary from call to call: to the program they are floats and ints, and one template serves them all."""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import math
import numbers
import operator
import pickle
import statistics
from collections.abc import Callable
from statistics import mean as average
from typing import Any

import numpy
import pytest
import torch
import torchlazy

from tests.lazy.models import mean_square_step

pytestmark = pytest.mark.usefixtures("operator_by_operator")
VALUES = [0.5 + 0.25 * i for i in range(10)]


def outcomes(call, *, fill=None):
    """What the plain and the compiled callable give for a tensor and each value; and the compiled one's report."""
    found = []
    run = torchlazy.compile(call, audit=False)
    for function in (call, run):
        found.append([])
        for value in VALUES:
            result = function(torch.ones(3).to("lazy"), value)
            found[-1].append([r.tolist() if isinstance(r, torch.Tensor) else r for r in result])
    return found[0], found[1], run.report()


def arithmetic(x, a):
    return x * (a * 2 + 1 - a / 3 + a**2 - (a // 0.3) * (a % 0.7) + abs(-a) + round(a, 1) - 1.5 / a), a * 2


def functions(x, a):
    return x * (math.cos(a) * math.sqrt(a) + math.exp(-a) + math.log1p(a) - math.tanh(a)), math.floor(a), int(a > 0)


def kinds(x, a):
    is_float = isinstance(a, float) and isinstance(a, numbers.Real) and not isinstance(a, (int, bool, torch.Tensor))
    is_int = isinstance(math.floor(a), int) and isinstance(round(a), numbers.Integral)
    return x * a if is_float and is_int else x * 1000, a.__class__.__name__


def comparisons(x, a):
    return x * max(a, 0.1) * min(a, 100.0) if 0 < a < 50 else x, a == "text", a is None


@pytest.mark.parametrize("call", [arithmetic, functions, kinds, comparisons])
def test_one_template_serves_all_values(call):
    wanted, found, report = outcomes(call)
    for a, b in zip(found, wanted, strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-6) and a[1:] == b[1:]
        assert [type(x) for x in a] == [type(x) for x in b]
    assert report.captures <= 2 and report.replays >= 8, report


def texts(x, a):
    log = {1.0: "one"}
    return (
        x * a, f"{a:.3f} {a!r}", str(a), "%.2f %s" % (a, a), log.get(a, "other"), float(a), int(a),  # noqa: UP031
        hash(a) == hash(a + 0.0),
        a.is_integer(), a.hex(), a.as_integer_ratio(), complex(a) * 1j, 2j * a, divmod(a, 0.4), math.fmod(a, 0.4),
        range(math.floor(a) + 1)[-1], [10, 20, 30, 40][math.floor(a)], sum([a, 1.0]),
    )  # fmt: skip


def arrays(x, a):
    doubled = numpy.float32(2) * a
    narrow = numpy.ones(2, dtype=numpy.float32) * a
    return (
        x * float(numpy.sin(a)),
        numpy.float64(a).item(),
        type(doubled).__name__,
        str(narrow.dtype),
        numpy.asarray(a).item(),
    )


def copies(x, a):
    return x, copy.deepcopy([a]), pickle.loads(pickle.dumps(a)), copy.copy(a)


@pytest.mark.parametrize("call", [texts, arrays, copies])
def test_whoever_takes_the_plain_value_gets_it(call):
    wanted, found, _ = outcomes(call)
    for a, b in zip(found, wanted, strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-6) and a[1:] == b[1:]


def test_code_that_asks_for_the_very_type_gets_plain_numbers():
    """`type(a) is float` asks no hook: such calls see plain numbers, and are captured for each value."""

    def call(x, a):
        return x * a if type(a) is float else x * 1000, type(x.sum().item()) is float, json.dumps([a])

    wanted, found, report = outcomes(call)
    assert found == wanted
    assert any("numbers are not followed" in reason for reason in report.reasons)


def test_code_with_a_table_of_types_gets_plain_numbers():
    wanted, found, report = outcomes(lambda x, a: (x * {float: a, int: 3.0}[type(a)], 0))
    assert found == wanted
    assert any("numbers are not followed" in reason for reason in report.reasons)


def test_an_optimizer_beside_code_that_asks_for_the_very_type():
    """Its step counts are read by torch's own Python, and followed all the same."""
    model = torch.nn.Linear(3, 2).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), type(optimizer.param_groups[0]["lr"]) is float

    run = torchlazy.compile(step, audit=False)
    assert all(run(torch.ones(4, 3).to("lazy"))[1] for _ in range(10))
    assert run.report().replays >= 7, run.report()


def test_names_of_types_alone_do_not_count():
    def call(x, a):
        name = type(x).__name__
        return x * float(2) * a, name

    wanted, found, report = outcomes(call)
    assert found == wanted
    assert report.replays >= 8, report


def test_powers_that_leave_the_floats():
    def call(x, a):
        base = 1.0 - a
        root = base**0.5
        return x * abs(root), isinstance(root, complex)

    wanted, found, _ = outcomes(call)
    for a, b in zip(found, wanted, strict=True):
        assert a[0] == pytest.approx(b[0]) and a[1:] == b[1:]


def test_numbers_that_outlive_the_call_are_plain():
    kept, log = {}, []

    def call(x, a):
        kept["a"], kept["loss"] = a * 2, x.sum().item() * a
        log.append((a, x.mean().item()))
        return x

    run = torchlazy.compile(call)
    for value in VALUES:
        run(torch.ones(3).to("lazy"), value)
        assert type(kept["a"]) is float and kept["a"] == value * 2
        assert type(kept["loss"]) is float and kept["loss"] == value * 3
    assert [number for number, _ in log] == VALUES and all(type(n) is float for row in log for n in row)


OPTIMIZERS = {
    "adam": lambda p, lr, **k: torch.optim.Adam(p, lr=lr, **k),
    "adamw": lambda p, lr, **k: torch.optim.AdamW(p, lr=lr, weight_decay=0.1, **k),
    "sgd": lambda p, lr, **k: torch.optim.SGD(p, lr=lr, momentum=0.9, **k),
    "adagrad": lambda p, lr, **k: torch.optim.Adagrad(p, lr=lr, **k),
}
WAYS = [
    (name, way, kind)
    for name in OPTIMIZERS
    for way in ("foreach", "loop", "fused", "capturable")
    for kind in ("float", "tensor")
    # torch refuses these itself, or has no such option
    if not (way == "capturable" and name in ("sgd", "adagrad"))
    if not (way == "capturable" or (kind == "tensor" and way == "foreach" and name in ("adam", "adamw")))
]


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize(("name", "way", "kind"), WAYS, ids=lambda value: str(value))
def test_ten_learning_rates_by_a_schedule_are_one_template(name, way, kind, device):
    options = {"foreach": way == "foreach", "fused": way == "fused"} if way != "loop" else {"foreach": False}
    if way == "foreach":
        options.pop("fused")
    if way == "fused":
        options.pop("foreach")

    def train(compiled: bool):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to(device)
        rate = torch.tensor(0.02) if kind == "tensor" else 0.02
        optimizer = OPTIMIZERS[name](model.parameters(), rate, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        step = mean_square_step(model, optimizer)

        run = torchlazy.compile(step, audit=False) if compiled else step
        losses = []
        for turn in range(12):
            losses.append(run(torch.randn(3, 4).to(device)).cpu())
            if turn:
                schedule.step()
        return torch.stack([*losses, *(p.detach().sum().cpu() for p in model.parameters())]), run

    wanted, _ = train(False)
    found, run = train(True)
    torch.testing.assert_close(found, wanted)
    report = run.report()
    assert report.captures <= 2 and report.replays >= 10, report  # the first call makes the optimizer's state


def test_betas_that_a_schedule_moves_are_inputs_too():
    def train(compiled: bool):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to("lazy")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)

        step = mean_square_step(model, optimizer)

        run = torchlazy.compile(step, audit=False) if compiled else step
        losses = []
        for _ in range(12):
            losses.append(run(torch.randn(3, 4).to("lazy")).cpu())
            schedule.step()
            assert all(type(beta) is float for beta in optimizer.param_groups[0]["betas"])
        return torch.stack(losses), run

    wanted, _ = train(False)
    found, run = train(True)
    torch.testing.assert_close(found, wanted)
    assert run.report().replays >= 8, run.report()


@pytest.mark.parametrize("kind", ["long sum", "shared operands"])
def test_deep_expressions_of_a_number(kind: str) -> None:
    """Hundreds of operators deep the number is guarded; operands that are shared are looked at once."""
    entries = {f"k{i}": float(i) for i in range(600)}

    def function(x: torch.Tensor) -> torch.Tensor:
        total = entries["k5"]
        if kind == "long sum":
            return x * total + sum(entries.values())
        for _ in range(40):
            total = total * 0.5 + total * 0.25
        return x * total

    run = torchlazy.compile(function, audit=False)
    x = torch.ones(3, device="lazy")
    for turn in range(4):
        entries["k5"] = turn + 1.5
        torch.testing.assert_close(run(x).cpu(), function(torch.ones(3)))


BY_NAME = {
    "pow": lambda x, a: torch.pow(input=x, exponent=a),
    "pow of a number": lambda x, a: torch.pow(self=a, exponent=x),
    "pow into a tensor": lambda x, a: torch.pow(x, a, out=torch.empty(0, device=x.device)),
    "dropout": lambda x, a: torch.dropout(input=x, p=a / 4, train=False),
    "full": lambda x, a: torch.full(size=(x.shape[0], 2), fill_value=a, device=x.device),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_name(name):
    call, rows = BY_NAME[name], (3, 3, 3, 5, 4, 3, 6)
    compiled = torchlazy.compile(call, audit=False)
    for number, value in zip(rows, VALUES, strict=False):
        x = torch.arange(1.0, number + 1).to("lazy")
        torch.testing.assert_close(compiled(x, value).cpu(), call(x.cpu(), value))


BEYOND: list[Callable[[torch.Tensor, int], Any]] = [
    lambda x, k: x * (k * 2**70),
    lambda x, k: x + round(k * 1e20),
    lambda x, k: k * 2**62 - x,
    lambda x, k: torch.add(x, x, alpha=k * 2**62),
    lambda x, k: x.clone().mul_(k * 2**63),
    lambda x, k: x.clamp(max=k * 2**62),
    lambda x, k: x / (int(x.sum()) * k * 2**60),
]


@pytest.mark.parametrize("program", BEYOND)
def test_ints_beyond_64_bits_are_refused_as_eager_does(program):
    """Torch takes ints up to 2**64 - 1 as numbers, and raises OverflowError for others."""

    def outcome(run: Callable[..., Any], *args: Any) -> Any:
        try:
            return run(*args).cpu()
        except OverflowError:
            return "OverflowError"

    x = torch.tensor([0.5, 1.5])
    for device in ("cpu", "lazy"):
        compiled = torchlazy.compile(program, audit=False)
        for k in (1, 2, 3, 4, 4, 5, 1, 2):
            expected = outcome(program, x, k)
            with torchlazy.lazy_mode():
                inside = outcome(program, x.to(device), k)
            for found in (outcome(compiled, x.to(device), k), inside):
                assert (found == "OverflowError") == (expected == "OverflowError")
                if found != "OverflowError":
                    torch.testing.assert_close(found, expected)


LIBRARIES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "mean": lambda x, k: x * statistics.mean([k, 1.0]),
    "mean of an alias": lambda x, k: x * average([k, 1.0]),
    "stdev": lambda x, k: x * statistics.stdev([k * 1.5, 1.0, 5]),
    "variance": lambda x, k: x * statistics.variance([k, 2]),
    "harmonic_mean": lambda x, k: x * statistics.harmonic_mean([k, 2.0]),
    "Decimal": lambda x, k: x * float(decimal.Decimal(k) / 3),
    "Decimal by float": lambda x, k: x * float(decimal.Decimal.from_float(k * 1.5)),
    "a decimal constant": lambda x, k: x * float(decimal.Decimal(2) * k),
    "powers by a modulus": lambda x, k: x * pow(3, k, 7) + pow(k, 3, mod=7),
    "ldexp": lambda x, k: x * math.ldexp(1.0, k),
    "timedelta": lambda x, k: x * datetime.timedelta(seconds=k).total_seconds(),
    "methods of classes": lambda x, k: x * int.__add__(k, 1) + float.__mul__(2.0, k * 1.5) + int.bit_length(k),
    "a float is not shifted": lambda x, k: x * ((k * 1.5) << 2),
    "nothing is shifted by a float": lambda x, k: x * (2 >> (k * 1.5)),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_numbers_in_libraries(name):
    """C code that looks at a number's type gets one that is no other, in each call."""

    def outcome(run: Callable[..., Any], *args: Any) -> Any:
        try:
            return run(*args).cpu()
        except TypeError as error:
            return str(error)

    x = torch.tensor([0.5, 1.5])
    for device in ("cpu", "lazy"):
        compiled = torchlazy.compile(LIBRARIES[name], audit=False)
        for k in (1, 2, 3, 4, 4, 5, 1):
            expected, found = outcome(LIBRARIES[name], x, k), outcome(compiled, x.to(device), k)
            assert type(found) is type(expected), found
            if isinstance(found, torch.Tensor):
                torch.testing.assert_close(found, expected)
            else:
                assert found.startswith("unsupported operand type(s)")


@pytest.mark.parametrize("method", ["__hash__", "__index__", "__int__"])
def test_numbers_that_python_must_get_plain(method: str) -> None:
    """What `__hash__` returns must be an int, not a number that is followed."""
    kind = type("Kind", (), {"code": 2})
    exec(f"def {method}(self): return Kind.code", {"Kind": kind}, found := dict[str, Any]())
    setattr(kind, method, found[method])
    held, ask = kind(), {"__hash__": hash, "__index__": operator.index, "__int__": int}[method]
    call = torchlazy.compile(lambda x: x * ask(held), audit=False)
    for number in range(12):
        kind.code = 2 + number // 2
        assert call(torch.ones(2)).tolist() == [2 + number // 2] * 2
