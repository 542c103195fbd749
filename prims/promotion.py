"""Type promotion and broadcasting of ATen's elementwise operators, computed on metadata.

Invariant: dtype categories rank bool < integer < float < complex, and a tensor with dimensions outranks a 0-dim tensor,
which outranks a Python number: a lower rank changes the result only by its category.
Source: the PyTorch manual, "Tensor Attributes", torch.dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import Dim, ScalarMeta, TensorMeta

HALVES = (torch.float16, torch.bfloat16)
# What kernels compute with; numbers of other dtypes (complex, float8, quantized) are the library's.
COMPUTED = frozenset({
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, *HALVES, torch.float32, torch.float64,
})  # fmt: skip
Operand = "TensorMeta | ScalarMeta | bool | int | float | complex"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where arithmetic on `dtype` happens: float32 for halves, else itself."""
    return torch.float32 if dtype in HALVES else dtype


def why_not_computed(*dtypes: torch.dtype) -> str:
    """Like "float8_e4m3fn dtype" for the first of them that no kernel computes with; "" where all are such."""
    other = next((dtype for dtype in dtypes if dtype not in COMPUTED), None)
    return (
        "" if other is None else "complex dtype" if other.is_complex else f"{str(other).removeprefix('torch.')} dtype"
    )


def is_integral(dtype: torch.dtype) -> bool:
    """bool or an integer."""
    return not dtype.is_floating_point and not dtype.is_complex


def number_dtype(kind: type) -> torch.dtype:
    """The dtype that a Python number of that type stands for."""
    if issubclass(kind, bool):
        return torch.bool
    if issubclass(kind, int):
        return torch.int64
    default = torch.get_default_dtype()
    return default if issubclass(kind, float) else default.to_complex()


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Promotion between two ranks of operands; None where a rank is empty."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher == torch.bool or not is_integral(lower):
        return torch.promote_types(higher, lower)
    return higher


def result_dtype(operands: Iterable[object]) -> torch.dtype:
    """The common dtype of tensors, 0-dim tensors and numbers."""
    ranks: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, TensorMeta):
            rank, dtype = (0 if operand.rank else 1), operand.dtype
        elif isinstance(operand, ScalarMeta):
            rank, dtype = 2, number_dtype(operand.kind)
        else:
            rank, dtype = 2, number_dtype(type(operand))
        known = ranks[rank]
        ranks[rank] = dtype if known is None else torch.promote_types(known, dtype)
    result = _combine(ranks[0], _combine(ranks[1], ranks[2]))
    if result is None:
        raise MetaError("promotion of no operands")
    return result


def broadcast_shapes(shapes: Iterable[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """The common shape, aligned at the last dimension; sizes of 1 give way."""
    result: list[Dim] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for i in range(1, len(shape) + 1):
            if result[-i] == 1:
                result[-i] = shape[-i]
            elif shape[-i] not in (1, result[-i]):
                raise MetaError(f"shapes do not broadcast: {shape} against {tuple(result)}")
    return tuple(result)
