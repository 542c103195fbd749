"""Metadata of values: what every stage knows about a tensor or a runtime scalar without its data.

Invariant: metadata is frozen and hashable, and a tensor's `shape` and `strides` have the same length.
Dimensions are plain ints today; a `sympy.Expr` over size symbols is legal everywhere a `Dim` stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:  # `import torch` imports this file (backend autoload): it must stay light
    import sympy

Dim: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype, element strides and device ("cpu", "cuda:0") of one tensor value."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    strides: tuple[Dim, ...]
    device: str = "cpu"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Dim:
        return product(self.shape)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ScalarMeta:
    """A number that is an input of the program: a `float`, `int`, `bool` or `complex`, changing from run to run."""

    kind: type[float] | type[int] | type[bool] | type[complex]

    def __str__(self) -> str:
        return self.kind.__name__


ValueMeta: TypeAlias = TensorMeta | ScalarMeta | tuple[TensorMeta | None, ...]


def product(dims: tuple[Dim, ...] | list[Dim]) -> Dim:
    """The number of elements of a shape; 1 for rank 0."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return total


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides as torch computes them: a dimension of size 0 counts as 1."""
    strides: list[Dim] = []
    step: Dim = 1
    for dim in reversed(shape):
        strides.append(step)
        step = step * (1 if dim == 0 else dim)
    return tuple(reversed(strides))


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The metadata of a real tensor."""
    return TensorMeta(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), str(tensor.device))
