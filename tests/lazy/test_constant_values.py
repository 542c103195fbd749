"""Questions whose answer depends on nothing outside the trace do not cut it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchlazy
from torchlazy.lazy.native.block import BLOCKS


def _cuts() -> dict[str, int]:
    return torchlazy.metrics()["cuts"]


def test_a_constant_condition_does_not_cut():
    x = torch.randn(4, 8).to("lazy")
    torchlazy.reset_metrics()
    y = x * 2
    positions = torch.arange(8, device="lazy")[None].expand(4, -1)
    packed = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    assert (packed[:, -1] == 0).all()
    assert not (positions == 3).all()
    assert not _cuts()
    assert torch.equal(y.cpu(), x.cpu() * 2)


def test_a_condition_on_an_input_cuts_and_is_right():
    for value in (0.0, 1.0):
        x = torch.full((3,), value).to("lazy")
        torchlazy.reset_metrics()
        assert bool((x == 1).all()) is (value == 1.0)
        assert set(_cuts()) <= {"bool", "item"}  # where it runs at once, nothing is left to run


def test_random_and_varying_numbers_are_no_constants():
    torch.manual_seed(0)
    answers = {bool((torch.rand(1, device="lazy") < 0.5).all()) for _ in range(32)}
    assert answers == {True, False}
    for number in (0.5, 2.5):
        x = torch.ones(1, device="lazy") * number
        assert bool((x > 1).all()) is (number > 1)


def test_an_in_place_write_is_seen():
    mask = torch.ones(3, device="lazy")
    assert mask.all()
    mask[1] = 0
    assert not mask.all()
    given = torch.zeros(3).to("lazy")
    mask = torch.ones(3, device="lazy")
    mask.mul_(given)
    assert not mask.all()


def test_results_of_one_operator_are_told_apart():
    for _ in range(2):
        for name, expected in (("values", True), ("indices", False)):
            found = torch.full((3,), 2, device="lazy").max(0)
            assert bool(getattr(found, name)) is expected
            torchlazy.sync()


def test_equal_arguments_of_other_types_make_other_constants():
    call = torchlazy.compile(lambda x, number: x + torch.ones(1, device=x.device, dtype=number).sum(0).item())
    x = torch.arange(3, dtype=torch.uint8).to("lazy")
    for _ in range(2):
        for dtype in (torch.float32, torch.int64, torch.bool):
            assert call(x, dtype).dtype == (x.cpu() + torch.ones(1, dtype=dtype).sum(0).item()).dtype


# ------------------------------------------------------------------------------------------ natively

Step = Callable[[torch.Tensor, int], object]
KEPT: dict[str, torch.Tensor] = {}


def _packed(x: torch.Tensor, n: int) -> object:
    """What transformers asks of the positions in each forward."""
    positions = torch.arange(n, device=x.device)[None]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    y = x * 2 + 1
    if ((steps != 1).cumsum(-1)[:, -1] == 0).all():
        y = y.sin() * n
    return (y * 3).sum()


def _of_other_numbers(x: torch.Tensor, n: int) -> object:
    y = x * 2 + 1
    return y.sin() * (torch.full((2,), n, device=x.device) * 2).sum().item() + y


def _of_a_float(x: torch.Tensor, n: int) -> object:
    y = x * 2 + 1
    return y.sin() * (torch.ones(2, device=x.device) * (n / 3)).sum().item() + y


def _of_ones(x: torch.Tensor, n: int) -> object:
    """The mask that BERT makes where it is given none."""
    mask = torch.ones(2, n, device=x.device)
    y = x * 2 + 1
    if torch.all(mask == 1):
        y = y.sin()
    return y * mask.sum().item() + torch.full((3,), n / 4, device=x.device).mul(2).sum().item()


def _partly_filled(x: torch.Tensor, n: int) -> object:
    """What is left as it was is of x."""
    held = x.repeat(2)
    held[:3].fill_(n)
    held[n:].zero_()
    held[0].expand(len(held)).fill_(2)
    y = x * 2 + 1
    return y.sin() * held.sum().item()


def _written(x: torch.Tensor, n: int) -> object:
    y = x * 2 + 1
    mask = torch.zeros(3, device=x.device)
    mask[n % 3] = 1
    found = [bool(mask[i] == 1) for i in range(3)]
    mask.mul_(x.sum())
    return y.sin() + found.index(True), bool((mask > 0).any())


def _written_before(x: torch.Tensor, n: int) -> object:
    """The factory is called in one trace; its memory is written, and read in later ones."""
    mask = KEPT.get(str(x.device))
    if mask is None:
        mask = KEPT[str(x.device)] = torch.zeros(4, device=x.device)
    y = x * 2 + 1
    count = (mask * 2).sum().item()
    mask[0] += 1
    return y.sin() * 2 + count


def _written_by_numpy(x: torch.Tensor, n: int) -> object:
    y = x * 2 + 1
    mask, other = torch.zeros(4), torch.zeros(4)
    np.asarray(mask)[1] = n
    ctypes.c_float.from_address(other.data_ptr()).value = n
    return y.sin() + ((mask + other) * 2).sum().item()


def _random(x: torch.Tensor, n: int) -> object:
    torch.manual_seed(n)
    y = x * 2 + 1
    return y.sin() + (torch.rand(3, device=x.device) > 0.5).sum().item()


def _read_twice(x: torch.Tensor, n: int) -> object:
    y = x * 2 + 1
    row = torch.arange(4, device=x.device) * 2
    first = row.sum().item()
    y = y.sin() * first
    row[1] = 7
    return y + row.sum().item() + (row == 7).sum().item()


STEPS = [
    _of_ones, _partly_filled, _packed, _of_other_numbers, _of_a_float, _written, _written_before, _written_by_numpy,
    _random, _read_twice,
]  # fmt: skip


@pytest.mark.parametrize("door", ["mode", "lazy"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_known_traces_read_what_eager_reads(step: Step, door: str) -> None:
    def play(device: str, inside: bool) -> list[object]:
        KEPT.clear()
        found = []
        for turn, n in enumerate((4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 4)):
            x = torch.linspace(0, 1, 6).add(turn).to(device)
            with torchlazy.lazy_mode() if inside else contextlib.nullcontext():
                result = step(x, n)
            found += [
                [one.tolist() if isinstance(one, torch.Tensor) else one for one in result]
                if isinstance(result, tuple)
                else result.tolist()
            ]
            torchlazy.flush()
            torchlazy.wait_for_compile()
        return found

    device = "lazy" if door == "lazy" else "cpu"
    found, wanted = play(device, door == "mode"), play("cpu", False)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("door", ["mode", "lazy"])
@pytest.mark.parametrize("step", [_packed, _of_ones], ids=lambda step: step.__name__)
def test_a_constant_read_of_a_known_trace_needs_no_memory(step: Step, door: str) -> None:
    x = torch.randn(4, 8).to("lazy" if door == "lazy" else "cpu")
    torchlazy.reset_metrics()
    for _ in range(8):
        with torchlazy.lazy_mode() if door == "mode" else contextlib.nullcontext():
            y = step(x, 5)
        torchlazy.flush()
        torchlazy.wait_for_compile()
    assert set(_cuts()) == {"flush" if door == "lazy" else "leaving lazy_mode"}
    before = BLOCKS.library.counts()["programs"]
    with torchlazy.lazy_mode() if door == "mode" else contextlib.nullcontext():
        y = step(x, 5)
    torchlazy.flush()
    assert BLOCKS.library.counts()["programs"] == before + 1 and y is not None
