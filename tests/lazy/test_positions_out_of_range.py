"""Positions out of range, and negative ones where eager takes none: the value's error is eager's, never a wrong value.

Each operator has one position a row as well as several: rules take the former apart, ATen's kernels do the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F

Call = Callable[[Tensor, Tensor], Any]
# x: float32 [3, 4]; i: int64 [3] with one bad position in the middle
CALLS: dict[str, Call] = {
    "gather": lambda x, i: x.gather(1, i.expand(3, 3)),
    "gather, one a row": lambda x, i: x.gather(1, i[:, None]),
    "gather of a vector": lambda x, i: x[0].gather(0, i[1:2]),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select, one": lambda x, i: x.index_select(0, i[1]),
    "index_select of columns": lambda x, i: x.index_select(1, i),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding, one": lambda x, i: F.embedding(i[1], x),
    "take": lambda x, i: x.take(i),
    "take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 1),
    "index": lambda x, i: x[i],
    "index, one": lambda x, i: x[i[1]],
    "index twice": lambda x, i: x[i, i],
    "index of columns": lambda x, i: x[:, i],
    "scatter, one a row": lambda x, i: x.scatter(1, i[:, None], 7.0),
    "scatter": lambda x, i: x.scatter(1, i.expand(3, 3), 7.0),
    "scatter of a vector": lambda x, i: x[0].scatter(0, i[1:2], 7.0),
    "scatter of values": lambda x, i: x.scatter(1, i[:, None], x * 2),
    "scatter in place": lambda x, i: x.clone().scatter_(1, i[:, None], 1.0),
    "scatter_add, one a row": lambda x, i: x.scatter_add(1, i[:, None], x),
    "scatter_add": lambda x, i: x.scatter_add(1, i.expand(3, 3), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i[:, None], x, "amax"),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_copy": lambda x, i: x.index_copy(0, i, x),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "index_put": lambda x, i: x.index_put((i,), x[0, 0]),
    "index_put, added": lambda x, i: x.index_put((i,), x[0, 0], accumulate=True),
    "put": lambda x, i: x.put(i, x[0, :3]),
    "nll_loss": lambda x, i: F.nll_loss(x, i),
    "nll_loss of one": lambda x, i: F.nll_loss(x[0], i[1]),
    "nll_loss, each": lambda x, i: F.nll_loss(x, i, reduction="none"),
    "nll_loss of images": lambda x, i: F.nll_loss(x.reshape(1, 3, 2, 2), i[[0, 1, 2, 0]].reshape(1, 2, 2)),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i),
    "cross_entropy, smoothed": lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
    "cross_entropy, weighted": lambda x, i: F.cross_entropy(x, i, weight=x[0] + 1),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x, i),
    "one_hot": lambda x, i: F.one_hot(i, 4),
    "one_hot, one": lambda x, i: F.one_hot(i[1], 4),
    "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
}  # fmt: skip


def outcome(call: Call, x: Tensor, i: Tensor, device: str) -> Tensor | Exception:
    """The value, or the error that it comes with."""
    try:
        return call(x.to(device), i.to(device)).cpu()
    except Exception as error:
        return error


@pytest.mark.parametrize("bad", (2, 9999, -1, -9999))
def test_as_in_eager(bad: int, compiled: None) -> None:
    """One test for all: each program has its own kernels, but most are alike."""
    x, i = torch.arange(12.0).reshape(3, 4) / 7, torch.tensor([0, bad, 1])
    for name, call in CALLS.items():
        want, have = outcome(call, x, i, "cpu"), outcome(call, x, i, "lazy")
        if isinstance(want, Exception):
            assert type(have) is type(want), f"{name} at {bad}: {have!r}, eager: {want!r}"
        else:
            assert isinstance(have, Tensor), f"{name} at {bad}: {have!r}, eager: {want!r}"
            torch.testing.assert_close(have, want)


def test_one_hot_as_in_eager(compiled: None) -> None:
    i = torch.tensor([[0, 3], [2, 2]])
    for classes in (4, 7, -1):
        assert torch.equal(F.one_hot(i.to("lazy"), classes).cpu(), F.one_hot(i, classes))
    assert torch.equal(F.one_hot(i[:0].to("lazy"), 3).cpu(), F.one_hot(i[:0], 3))
    logits = torch.randn(2, 2, 4)
    want = (logits.softmax(-1) * F.one_hot(i, 4)).sum(-1)
    torch.testing.assert_close((logits.to("lazy").softmax(-1) * F.one_hot(i.to("lazy"), 4)).sum(-1).cpu(), want)


def test_one_hot_in_lazy_mode_as_in_eager(compiled: None) -> None:
    turned = torch.arange(6).view(2, 3).t()
    for classes in (-1, 6):
        with torchlazy.lazy_mode():
            made = F.one_hot(turned, classes)
        want = F.one_hot(turned, classes)
        assert made.stride() == want.stride() and torch.equal(made, want)
    with pytest.raises(RuntimeError, match="out of bounds"), torchlazy.lazy_mode():
        print(F.one_hot(turned, 3))
