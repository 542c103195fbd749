"""Random programs of views, writes, copies and cuts: the recorder's bookkeeping against eager; and random programs of
everything (tests/lazy/random_programs.py) on the lazy device, in `lazy_mode()` and compiled.

`TORCHLAZY_RANDOM_PROGRAMS=2000` runs so many of the latter, `TORCHLAZY_RANDOM_SEED` is the first.
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver

from tests.lazy.compare import check, data
from tests.lazy.random_programs import SPACE, Program, drawn
from tests.lazy.random_runs import WAYS, reduced, world, wrong

_FIRST = int(os.environ.get("TORCHLAZY_RANDOM_SEED", "0"))
_COUNT = int(os.environ.get("TORCHLAZY_RANDOM_PROGRAMS", "24"))
_COMPILED = range(_FIRST, _FIRST + max(5, _COUNT // 8))  # the compiler takes ten times as long
_KEPT = 9  # tensors alive at once: older ones die, so that liveness and donation are exercised


def _view(r: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Some view of x with at least one element."""
    kinds = ["detach", "unsqueeze", "flatten"]
    if x.dim():
        d = r.randrange(x.dim())
        n = x.shape[d]
        kinds += ["select", "narrow", "step", "transpose", "split", "expand"]
    match r.choice(kinds):
        case "detach":
            return x.detach()
        case "unsqueeze":
            return x.unsqueeze(0) if x.dim() < 4 else x
        case "flatten":
            return x.reshape(-1)  # a view or a copy, as eager decides
        case "select":
            return x.select(d, r.randrange(n))
        case "narrow":
            start = r.randrange(n)
            return x.narrow(d, start, r.randint(1, n - start))
        case "step":
            return x[(slice(None),) * d + (slice(r.randrange(n), None, r.randint(1, 2)),)]
        case "transpose":
            return x.transpose(d, r.randrange(x.dim()))
        case "split":
            return r.choice(x.split(r.randint(1, n), d))
        case _:
            return x.unsqueeze(0).expand(2, *x.shape)[r.randrange(2)] if x.dim() < 4 else x


def _write(r: random.Random, x: torch.Tensor, y: torch.Tensor) -> None:
    """Some in-place operator on x, with y as a broadcast operand in memory of its own."""
    number = r.choice([0.5, -1, 2, 0.25])
    match r.randrange(9):
        case 0:
            x.add_(number)
        case 1:
            x.mul_(number)
        case 2:
            x.copy_(y.sum() + number)
        case 3:
            x.fill_(number)
        case 4:
            x.clamp_(-2, 2)
        case 5:
            x.add_(y.mean(), alpha=number)
        case 6:
            x[...] = y.reshape(-1)[0].clone()
        case 7:
            x.masked_fill_(x > 1, number)
        case _:
            torch.add(x, number, out=x)


def _compute(r: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Some new tensor made from x."""
    match r.randrange(7):
        case 0:
            return x.clone()
        case 1:
            return x * 0.5 + 1
        case 2:
            return x.tanh()
        case 3:
            return x.sum(-1, keepdim=True) if x.dim() else x + 1
        case 4:
            return x.contiguous()
        case 5:
            return torch.cat([x.reshape(-1), x.reshape(-1)]).narrow(0, 0, x.numel()).view(x.shape)
        case _:
            return torch.where(x > 0, x, -x)


def _program(seed: int, device: str, repeats: int) -> list[Any]:
    """Runs one random program over the same roots `repeats` times, as a training loop would."""
    roots = [data(device, 4, 6), data(device, 2, 3, 4, seed=1), data(device, 5, seed=2)]
    found: list[Any] = []
    for _ in range(repeats):
        r = random.Random(seed)
        pool = list(roots)
        for _ in range(22):
            x, y = r.choice(pool), r.choice(pool)
            match r.randrange(10):
                case 0 | 1 | 2:
                    pool.append(_view(r, x))
                case 3 | 4 | 5:
                    _write(r, x, y)
                case 6 | 7:
                    pool.append(_compute(r, x))
                case 8:
                    pool[r.randrange(len(pool))] = x
                case _:
                    chance = r.random()
                    if chance < 0.3:
                        found.append(x.sum().item() > 0.1)
                    elif chance < 0.6:
                        torchlazy.flush()
            if len(pool) > _KEPT:
                del pool[r.randrange(len(pool))]
        for root in roots:
            root.clamp_(-3, 3)
        found += [t.clone() for t in pool] + [t.stride() for t in pool] + [t._version for t in pool]
        torchlazy.flush()
    return [*found, *roots]


@pytest.mark.parametrize("seed", range(60))
def test_operator_by_operator(seed, operator_by_operator):
    check(lambda device: _program(seed, device, repeats=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(100, 116))
def test_compiled_and_replayed(seed, compiled):
    check(lambda device: _program(seed, device, repeats=3), rtol=1e-3, atol=1e-3)


@functools.cache
def _of_everything(seed: int) -> Program:
    return drawn(seed, world)


def _check(seed: int, way: str) -> None:
    torchlazy.config.rng = "eager"
    torchlazy.config.precision = "eager"
    program = _of_everything(seed)
    if wrong(program, way):
        small = reduced(program, way, driver.forget)
        driver.forget()
        pytest.fail(f"{way}, {wrong(small, way)}\n{small}", pytrace=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT))
def test_of_everything(seed, way, operator_by_operator):
    _check(seed, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", _COMPILED)
def test_of_everything_through_the_compiler(seed, way, compiled):
    _check(seed, way)


def test_a_failing_program_is_reduced(operator_by_operator, monkeypatch):
    """To the lines and the call that it takes to see the difference."""
    program = _of_everything(0)
    x = program.inputs[0][0]
    line = f"v99 = {x}.sum() if torchlazy.is_lazy({x}) else 1"
    monkeypatch.setitem(SPACE, "torchlazy", torchlazy)
    program = replace(program, lines=(*program.lines[:3], line, *program.lines[3:]))
    assert wrong(program, "lazy")
    small = reduced(program, "lazy", driver.forget)
    assert small.lines == (line,) and len(small.calls) == 1 and line in str(small)
