"""When a lazy result equals eager's: dtype, shape, strides, and values within the dtype's usual tolerance.

Invariant: beyond the tolerance a value passes only if it is as close to the float64 result as eager's own value is
(twice its error, or the tolerance, around the exact value), so that another order of summation is no failure and a
wrong formula is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

EAGER_ERRORS = 3.0  # how many of eager's own errors a result may be away from the exact value


class Difference(AssertionError):
    """A lazy result is not eager's. `kind` is "value", "stride", "dtype", "shape" or "structure"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def compare(
    have: Any, want: Any, *, values: bool = True, exact: Callable[[], Any] | None = None, strides: bool = True
) -> bool:
    """Raise the worst Difference between a lazy and an eager result; `exact()` is the float64 result, or None.

    Returns whether every value was within the tolerance, without a look at the float64 result.
    """
    plain = True
    mine, theirs = pytree.tree_leaves(have), pytree.tree_leaves(want)
    if len(mine) != len(theirs):
        raise Difference("structure", f"{len(mine)} results, eager has {len(theirs)}")
    layout: Difference | None = None
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(b, torch.Tensor):
            if isinstance(a, torch.Tensor) or (a != b and not (a != a and b != b)):
                raise Difference("value", f"result {position} is {a!r}, eager's {b!r}")
            continue
        _same_facts(position, a, b)
        if values:
            plain &= _same_values(position, a, b, exact)
        if strides and b.layout is torch.strided and not _same_strides(a, b):
            layout = layout or Difference("stride", f"result {position} has strides {a.stride()}, eager's {b.stride()}")
    if layout is not None:
        raise layout
    return plain


def _same_facts(position: int, a: Any, b: torch.Tensor) -> None:
    if not isinstance(a, torch.Tensor):
        raise Difference("structure", f"result {position} is a {type(a).__name__}, eager's a tensor")
    if a.dtype != b.dtype:
        raise Difference("dtype", f"result {position} is {a.dtype}, eager's {b.dtype}")
    if a.shape != b.shape:
        raise Difference("shape", f"result {position} is {tuple(a.shape)}, eager's {tuple(b.shape)}")


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return b.numel() == 0 or a.stride() == b.stride()  # strides of no elements address nothing


def _same_values(position: int, a: torch.Tensor, b: torch.Tensor, exact: Callable[[], Any] | None) -> bool:
    a, b = (x.to_dense() if x.layout is not torch.strided else x for x in (a.detach(), b.detach()))
    if a.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    a, b = a.cpu().resolve_conj().resolve_neg(), b.cpu().resolve_conj().resolve_neg()
    try:
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=False)
    except AssertionError as error:
        if exact is not None and (b.dtype.is_floating_point or b.dtype.is_complex) and _as_good(position, a, b, exact):
            return False
        raise Difference("value", f"result {position}: {' '.join(str(error).split())[:300]}") from None
    return True


def _as_good(position: int, a: torch.Tensor, b: torch.Tensor, exact: Callable[[], Any]) -> bool:
    try:
        reference = pytree.tree_leaves(exact())[position].detach()
    except Exception:  # no float64 form of this call: the tolerance decides
        return False
    if b.dtype.is_complex and reference.is_complex():
        a, b, reference = (torch.view_as_real(x.resolve_conj()) for x in (a, b, reference))
    reference = reference.double()
    if reference.shape != a.shape:
        return False
    reference = torch.where(torch.isinf(reference.to(a.dtype)), reference.to(a.dtype).double(), reference)
    rtol, atol = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}.get(a.dtype, (1.3e-6, 1e-5))
    mine, theirs = (a.double() - reference).abs(), (b.double() - reference).abs()
    known = torch.isfinite(theirs)  # an eager value that overflowed in between is no measure
    worst = theirs[known].amax() if known.any() else torch.zeros(())
    near_exact = (mine <= EAGER_ERRORS * worst + atol + rtol * reference.abs()) & torch.isfinite(mine)
    same = torch.isclose(a.double(), reference, equal_nan=True)  # infinite or NaN, both
    near_eager = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    return bool((near_exact | same | near_eager).all())
