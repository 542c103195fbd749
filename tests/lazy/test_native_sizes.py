"""Traces that differ in sizes only: one path and one program serve them, with eager's values at every size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.native.sizes import RunsForAllSizes, RunsForSizes
from torchlazy.lazy.report import metrics
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from tests.lazy.test_native_recorder import _followed, by_the_driver

__all__ = ["_followed"]  # the fixture

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")


def families() -> list[tuple[int, str, int]]:
    """State, reason and how often it was followed, of each family of traces."""
    return [(state, reason, follows) for _, _, state, reason, follows in LIBRARY.module.families()]


def follows() -> int:
    return sum(often for _, _, often in families())


def both(program: Callable[[int], Any], sizes: list[int]) -> Iterator[tuple[int, Any, Any]]:
    """Each size in this order, with what the program gives under the mode and in eager."""
    for size in sizes:
        torch.manual_seed(size)
        want = program(size)
        torch.manual_seed(size)
        with torchlazy.lazy_mode():
            have = program(size)
        yield size, have, want


def played(program: Callable[[int], Any], sizes: list[int]) -> None:
    """The program under the mode gives eager's values at each of these sizes, in this order."""
    for size, have, want in both(program, sizes):
        torch.testing.assert_close(
            have, want, rtol=0, atol=0, equal_nan=True, msg=lambda text, size=size: f"{size}: {text}"
        )


MANY = [5, 9, 14, 6, 21, 8, 33, 11, 7, 18, 27, 10, 3, 40, 12, 2, 16, 50, 64, 90, 1, 13, 128, 4, 0, 19]
W = torch.randn(8, 8)
TABLE = torch.randn(40, 8)


def attention(n: int) -> Any:
    x = torch.randn(2, n, 8)
    q, k, v = ((x @ W).view(2, n, 2, 4).transpose(1, 2) for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, n, 8)
    return F.layer_norm(y + x, (8,)).mean(1), y


def written(n: int) -> Any:
    x = torch.zeros(n, 8)
    x += torch.arange(n).unsqueeze(1)
    x[1:] *= 2
    y = torch.cat([x, x[: n // 2], W])
    return y.sum(0), y, x.cumsum(0)


def numbers(n: int) -> Any:
    x = torch.randn(n, 4)
    return x * n, x / (n + 1), F.pad(x, (0, 0, 1, n)), x.sum() / x.shape[0], x.repeat(2, 1)


def dropped(n: int) -> Any:
    x = torch.randn(n, 8, requires_grad=True)
    y = F.dropout(x @ W, 0.5).relu().square().sum()
    y.backward()
    return y.detach(), x.grad


def looked_up(n: int) -> Any:
    codes = torch.arange(n) % 40
    return (
        F.embedding(codes, TABLE).tanh().sum(1),
        F.one_hot(codes, 40).sum(0),
        F.cross_entropy(TABLE[codes], codes % 8),
    )


def read_between(n: int) -> Any:
    x = torch.randn(n, 8)
    y = (x @ W).relu()
    scale = float(y.mean()) if n else 1.0
    z = y * scale
    return z.sum(), z.exp().sum(0), z.tolist()


def square(n: int) -> Any:
    x = torch.randn(n, n)
    y = x @ x.t() + x
    return y.softmax(-1) @ x, y.diagonal().sum(), y.triu().sum(1)


def two_sizes(n: int) -> Any:
    x = torch.randn(n % 5 + 2, n + 2, 8)
    y = (x @ W).flatten(0, 1).relu()
    return y.sum(0), y.view(x.shape).amax(1), y


def convolved(n: int) -> Any:
    x = torch.randn(2, 3, n + 8)
    y = F.conv1d(x, torch.ones(4, 3, 3), padding=1).relu()
    return F.max_pool1d(y, 2), F.interpolate(y, scale_factor=2.0).sum(1), y.mean(-1)


@pytest.mark.parametrize(
    "program", [attention, written, numbers, dropped, looked_up, square, two_sizes, convolved], ids=lambda f: f.__name__
)
def test_one_path_serves_all_sizes(program: Callable[[int], Any]) -> None:
    sizes = [n for n in MANY if n > 1]
    played(program, [*sizes, *(n + 70 for n in sizes)])
    assert follows() >= 20, families()
    played(program, MANY)


def test_values_that_are_read_part_the_trace() -> None:
    played(read_between, MANY)
    played(read_between, [n for n in MANY[::-1] if n])
    assert follows() >= 8, families()


@pytest.mark.parametrize("least", [4, 12])
def test_results_that_are_no_expressions_are_not_promised(least: int) -> None:
    """The least of a size and a constant looks like the size, or like the constant, on one side of it."""

    def decomposed(n: int) -> Any:
        x = torch.randn(n, least)
        u, s, v = torch.linalg.svd(x @ torch.eye(least), full_matrices=False)
        return s, (u * s) @ v

    def pairs(n: int) -> Any:
        x = torch.arange(3.0 * n).view(n, 3)
        return torch.pdist(x * 2).sqrt(), (x + 1).sum()

    sizes = [n for n in MANY if n > 1]
    for program in (decomposed, pairs):
        for size, have, want in both(program, sizes):
            assert [t.shape for t in have] == [t.shape for t in want], (program, size)
            torch.testing.assert_close(have, want)


def test_sizes_beyond_those_that_were_tried_are_not_served() -> None:
    def cropped(n: int) -> Any:
        x = torch.randn(n, 8)
        y = (x @ W)[: min(n, 32)].relu() + 1
        return y.sum(0), y * 2

    played(cropped, [5, 9, 14, 6, 21, 8, 11, 7, 18, 27, 10, 3, 60, 12, 33, 31, 32, 100, 34, 20])


def test_an_error_at_a_new_size_is_eagers() -> None:
    def program(codes: Tensor) -> Tensor:
        return (F.embedding(codes, TABLE) @ W).relu().sum(1)

    for n in (3, 5, 8, 4, 9, 7, 12, 6, 10, 11, 15, 14):
        with torchlazy.lazy_mode():
            have = program(torch.arange(n))
        torch.testing.assert_close(have, program(torch.arange(n)), rtol=0, atol=0)
    assert follows() > 0, families()
    with pytest.raises(IndexError), torchlazy.lazy_mode():
        print(program(torch.arange(13) + 35))


def test_a_size_that_comes_often_gets_a_path_of_its_own() -> None:
    played(attention, [5, 9, 14, 6, 21, 8, 33, 11, 7, 18, 27, 10])
    before = follows()
    played(attention, [16] * 20)
    assert before > 0 and follows() < before + 12, families()


def test_other_values_that_are_kept_are_given() -> None:
    kept: list[Tensor] = []

    def program(n: int) -> Any:
        x = torch.randn(n, 8)
        y = (x @ W).relu()
        z = y * 2 + 1
        if n % 3 == 0:
            kept.append(y)
        return z.sum(0)

    played(program, MANY + MANY[::-1])
    for n, y in zip([n for n in MANY + MANY[::-1] if n % 3 == 0], kept[1::2], strict=True):
        torch.manual_seed(n)
        torch.testing.assert_close(y, (torch.randn(n, 8) @ W).relu(), rtol=0, atol=0)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(40, 8), nn.LayerNorm(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 40)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.table(codes))))


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_training_at_a_new_length_each_step(compiled: bool) -> None:
    if compiled:
        by_the_driver()
    chance = random.Random(0)
    lengths = [chance.randint(3, 60) for _ in range(36)]
    losses: list[list[Tensor]] = []
    compiles = metrics.compiles
    for lazy in (False, True):
        torch.manual_seed(0)
        model = _Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        found = []
        for turn, length in enumerate(lengths):
            codes = torch.arange(2 * length).view(2, length) % 40

            def step(codes: Tensor = codes, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                loss = F.cross_entropy(model(codes).flatten(0, 1), codes.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            if lazy:
                with torchlazy.lazy_mode():
                    found.append(step())
                if compiled and turn in (4, 5, 6, 7):
                    torchlazy.wait_for_compile()
            else:
                found.append(step())
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4 if compiled else 0, atol=1e-5 if compiled else 0)
    assert follows() >= 15, families()
    if compiled:
        assert metrics.compiles - compiles <= 2


def test_programs_for_all_sizes_run_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """New sizes are asked for once each; a size that comes again is followed without Python."""
    by_the_driver()
    asked: list[tuple[int, ...]] = []
    original = RunsForAllSizes.at
    monkeypatch.setattr(RunsForAllSizes, "at", lambda self, now: asked.append(tuple(now)) or original(self, now))
    monkeypatch.setattr(RunsForSizes, "__call__", lambda *given: pytest.fail("it runs in Python"))

    def program(size: int) -> Any:
        x = torch.arange(size * 4.0).view(size, 4)
        return (x @ x.t()).softmax(-1).sum(0).exp() + x.tanh().sum(1) * 2

    sizes = [5, 7, 9, 12, 17, 21, 23, 25, 12, 17, 40, 41, 40, 12, 44, 51, 44, 61, 62, 51]
    for _, have, want in both(program, sizes):
        torch.testing.assert_close(have, want)
        torchlazy.wait_for_compile()
    assert follows() >= 6, families()
    assert len(asked) == len(set(asked)) >= 4
