"""Corners of operators that random calls against eager found: values, signs of zero, dtypes, shapes and strides.

All calls are recorded into one program, so that what one of them compiles is seen by the others: 0.0 and -0.0 stand in
one program here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.utils import _pytree as pytree
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.tensor import LAZY

Place = Callable[[Tensor], Tensor]
NEWEST = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)

X = torch.tensor([3.25, -2.0, 1.0, 5.0])
BYTES = torch.tensor([1, 3, 0], dtype=torch.int8)
TRANSPOSED = torch.arange(15.0).reshape(5, 3).t()
CHANNELS = torch.arange(10.0)[::2].expand(3, 5)
WINDOWS = torch.arange(8, dtype=torch.int32).as_strided((3, 5), (1, 1), 1)
EXPONENTS = torch.tensor([3, -3, 200, -200], dtype=torch.int16)

CALLS: dict[str, Callable[[Place], Any]] = {
    "division by both zeros": lambda p: (p(X) / 0.0, p(X) / -0.0),
    "whole division by both zeros": lambda p: (p(X) // 0.0, p(X) // -0.0),
    "signs of both zeros": lambda p: (torch.copysign(p(X), 0.0), torch.copysign(p(X), -0.0)),
    "bounds of both zeros": lambda p: (p(X).clamp(max=-0.0), p(X).clamp(max=0.0)),
    "both zeros everywhere": lambda p: (torch.full_like(p(X), 0.0), torch.full_like(p(X), -0.0)),
    "copy of a number": lambda p: (p(X).copy_(2), p(BYTES).copy_(300), p(X).copy_(1e300), p(BYTES).copy_(True)),
    "a number of uint64": lambda p: (p(X) + 2**63, p(BYTES.long()) + 2**63, p(X).fill_(2**64 - 1)),
    "power of truth values": lambda p: p(X > 0) ** True,
    "mean beside an infinity": lambda p: torch.var_mean(p(torch.tensor([[1.0, 2.0], [torch.inf, 1.0]])), 1),
    "a number selected": lambda p: torch.index_select(p(X[0]), 0, p(torch.tensor([0]))),
    "whole factors of integers": lambda p: torch.addmm(
        p(BYTES.long()[None]), p(BYTES.long()[None, :1]), p(BYTES.long()[None]), beta=-0.0, alpha=2.5
    ),
    "masked fill by a tensor": lambda p: (
        p(BYTES).masked_fill(p(BYTES > 0), p(torch.tensor(100))),
        p(BYTES.to(torch.uint8)).masked_fill(p(BYTES > 0), p(torch.tensor(-200))),
        p(X.half()).masked_fill(p(X > 0), p(torch.tensor(-torch.inf))),
    ),
    "ldexp in bfloat16 of a power without dimensions": lambda p: torch.ldexp(
        p(BYTES), p(torch.tensor(3, dtype=torch.bfloat16))
    ),
    "ldexp": lambda p: torch.ldexp(p(X), p(torch.tensor([3, -3, 20, -20]))),
    "strides: copysign": lambda p: torch.copysign(p(WINDOWS), p(TRANSPOSED)),
    "strides: floor division": lambda p: p(WINDOWS) // (p(TRANSPOSED) + 1),
    "strides: div floor": lambda p: torch.div(p(TRANSPOSED), p(WINDOWS) + 1, rounding_mode="floor"),
    "strides: xlogy": lambda p: torch.xlogy(p(CHANNELS), p(TRANSPOSED)),
    "strides: xlog1py": lambda p: torch.special.xlog1py(p(CHANNELS), p(TRANSPOSED)),
    "strides: heaviside": lambda p: torch.heaviside(p(CHANNELS), p(TRANSPOSED)),
    "strides: logical": lambda p: torch.logical_or(p(CHANNELS), p(TRANSPOSED.int())),
    "strides: logaddexp": lambda p: torch.logaddexp(p(CHANNELS[:, :1]), p(TRANSPOSED)),
    "strides: pow": lambda p: p(CHANNELS) ** p(WINDOWS),
    "strides: remainder": lambda p: p(CHANNELS.bfloat16()) % (p(TRANSPOSED.bfloat16()) + 1),
    "strides: windows as columns": lambda p: torch.nn.functional.unfold(p(torch.ones(2, 6, 3)), (1, 3), padding=(0, 2)),
    "strides: isin": lambda p: torch.isin(p(WINDOWS), p(BYTES.int())),
    "strides: one Fourier transform": lambda p: torch.fft.ifft(p(torch.ones(5, 6, 7)), n=10, dim=1),
    "strides: two Fourier transforms": lambda p: torch.fft.rfftn(p(torch.ones(5, 6, 7)), dim=(0, 1)),
    "strides: inverse Fourier transform": lambda p: torch.fft.irfftn(p(torch.ones(5, 6, 7) + 0j), dim=(0, 1)),
}
if NEWEST:  # earlier releases raise 2 to the power first, in float32
    CALLS["ldexp beyond the power's range"] = lambda p: (
        torch.ldexp(p(X), p(EXPONENTS)),
        torch.ldexp(p(X.double()), p(EXPONENTS.long() * 5)),
        torch.ldexp(p(torch.tensor([0.0, -0.0, torch.inf, 1e-30])), p(torch.tensor([255, 200, -300, 200]))),
        torch.ldexp(p(X.bfloat16()), p(EXPONENTS)),
    )


def _lazily(x: Tensor) -> Tensor:
    span = x.untyped_storage().nbytes() // x.element_size()
    memory = x.as_strided((span,), (1,), 0).clone()
    return recorder.new_real_tensor(memory.as_strided(x.shape, x.stride(), x.storage_offset()), LAZY)


def _copied(x: Tensor) -> Tensor:
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).clone()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def test_together(compiled):
    """Every call in one program."""
    have = {name: call(_lazily) for name, call in CALLS.items()}
    torchlazy.sync()
    for name, call in CALLS.items():
        for mine, theirs in zip(pytree.tree_leaves(have[name]), pytree.tree_leaves(call(_copied)), strict=True):
            assert mine.stride() == theirs.stride(), name
            mine = mine.cpu()
            torch.testing.assert_close(mine, theirs, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
            if theirs.dtype.is_floating_point:
                known = ~theirs.isnan()
                assert torch.equal(mine.signbit()[known], theirs.signbit()[known]), name


@pytest.mark.parametrize(
    ("x", "number"),
    [
        (BYTES, 300),
        (BYTES, torch.nan),
        (BYTES.to(torch.uint8), -3.5),
        (BYTES.to(torch.int16), 1e10),
        (X.half(), 70000),
        (X.half(), 1e6),
        (X, 1e300),
    ],
)
def test_a_number_that_does_not_fit_is_refused(compiled, x, number):
    """It is read from a tensor: the error comes where it is computed."""
    held = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
    with pytest.raises(RuntimeError, match="without overflow"):
        x.masked_fill(x > 0, held)
    lazily = _lazily(x).masked_fill(_lazily(x > 0), _lazily(held))
    with pytest.raises(RuntimeError, match="without overflow"):
        torchlazy.sync()
    del lazily


def _far_from_zero(*shape: int) -> Tensor:
    """Mean 1e4, deviation 1e-2: most digits of float32 are the mean's."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 1e-2 + 1e4).float()


def _batch_norm(x: Tensor) -> tuple[Tensor, ...]:
    mean, var = torch.zeros_like(x[0, :, 0, 0]), torch.ones_like(x[0, :, 0, 0])
    return torch.nn.functional.batch_norm(x, mean, var, training=True), mean, var


ACCURATE: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "batch norm": (_batch_norm, _far_from_zero(16, 3, 32, 32)),
    "batch norm, channels last": (
        _batch_norm,
        _far_from_zero(16, 3, 32, 32).contiguous(memory_format=torch.channels_last),
    ),
    "batch norm, infinite": (_batch_norm, _far_from_zero(2, 3, 4, 4).index_fill(1, torch.tensor([1]), torch.inf)),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), _far_from_zero(2, 70000)),
    "group norm": (lambda x: torch.nn.functional.group_norm(x, 2), _far_from_zero(1, 32, 64, 64)),
    "instance norm": (torch.nn.functional.instance_norm, _far_from_zero(2, 3, 32, 32)),
    "var": (lambda x: torch.var(x, (0, 2)), _far_from_zero(20, 3, 300)),
    "sum of products": (lambda x: (x * x).sum(), _far_from_zero(30000)),
    "mean of equal numbers": (lambda x: (x * x).mean(), torch.full((100001,), 0.1)),
    "product": (lambda x: (x / 1e4).prod(-1), _far_from_zero(2, 9000)),
    "cov": (torch.cov, _far_from_zero(3, 5000)),
}


def test_as_accurate_as_eager(compiled):
    """Within three times eager's error against float64, or six units in the last place of the largest number."""
    have = {name: call(_lazily(x)) for name, (call, x) in ACCURATE.items()}
    torchlazy.sync()
    for name, (call, x) in ACCURATE.items():
        results = (pytree.tree_leaves(r) for r in (have[name], call(_copied(x)), call(x.double())))
        for mine, theirs, exact in zip(*results, strict=True):
            mine = mine.cpu()
            finite = exact.isfinite()
            assert torch.equal(mine[~finite], theirs[~finite]) or mine[~finite].isnan().equal(theirs[~finite].isnan())
            scale = exact[finite].abs().max().item() * 2.0**-23
            error, worst = ((r[finite].double() - exact[finite]).abs().max().item() for r in (mine, theirs))
            assert error <= 3 * worst + 6 * scale, f"{name}: {error} off, eager {worst}"
