"""The attributes of primitives that are one call of a transform, of linear algebra, or of a collective.

Invariant: as in `prims/library/attrs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchlazy.prims.attrs import Axes, Dims
from torchlazy.prims.meta import Dim


# --- Fourier transforms ---
@dataclass(frozen=True)
class FftC2cAttrs:
    """Axes; normalization: 0 none, 1 1/sqrt(n), 2 1/n."""

    dim: Axes
    normalization: int
    forward: bool


@dataclass(frozen=True)
class FftR2cAttrs:
    """Axes, of which the last is halved if onesided."""

    dim: Axes
    normalization: int
    onesided: bool


@dataclass(frozen=True)
class FftC2rAttrs:
    """Axes, and the size of the last of them in the result."""

    dim: Axes
    normalization: int
    last_dim_size: Dim


# --- linear algebra ---
@dataclass(frozen=True)
class CheckErrorsAttrs:
    """Whether ATen raises where it fails, instead of telling in `info`."""

    check_errors: bool


@dataclass(frozen=True)
class CholeskyAttrs:
    """Which triangle; whether ATen raises."""

    upper: bool
    check_errors: bool


@dataclass(frozen=True)
class UpperAttrs:
    """Which triangle."""

    upper: bool


@dataclass(frozen=True)
class EighAttrs:
    """Which triangle is read; whether vectors are wanted."""

    UPLO: str
    compute_v: bool


@dataclass(frozen=True)
class SvdAttrs:
    """Square factors or thin ones, with vectors or not, by which driver (CUDA)."""

    full_matrices: bool
    compute_uv: bool
    driver: str | None


@dataclass(frozen=True)
class QrAttrs:
    """reduced, complete or r."""

    mode: str


@dataclass(frozen=True)
class PivotAttrs:
    """With row exchanges or without."""

    pivot: bool


@dataclass(frozen=True)
class PivotCheckAttrs:
    """With row exchanges or without; whether ATen raises."""

    pivot: bool
    check_errors: bool


@dataclass(frozen=True)
class LuSolveAttrs:
    """A X = B or X A = B; A or its adjoint."""

    left: bool
    adjoint: bool


@dataclass(frozen=True)
class SolveAttrs:
    """A X = B or X A = B; whether ATen raises."""

    left: bool
    check_errors: bool


@dataclass(frozen=True)
class SolveTriangularAttrs:
    """Which triangle, which side, and whether the diagonal counts as ones."""

    upper: bool
    left: bool
    unitriangular: bool


@dataclass(frozen=True)
class HermitianCheckAttrs:
    """Whether the matrix is Hermitian; whether ATen raises."""

    hermitian: bool
    check_errors: bool


@dataclass(frozen=True)
class HermitianAttrs:
    """Whether the matrix is Hermitian."""

    hermitian: bool


@dataclass(frozen=True)
class OrmqrAttrs:
    """Which side Q stands on, and whether it is transposed."""

    left: bool
    transpose: bool


@dataclass(frozen=True)
class LuUnpackAttrs:
    """Which parts are wanted: the factors, the permutation."""

    unpack_data: bool
    unpack_pivots: bool


# --- special functions ---
@dataclass(frozen=True)
class PolygammaAttrs:
    """The order of the derivative of digamma."""

    n: int


# --- collectives ---
@dataclass(frozen=True)
class AllReduceAttrs:
    """sum, avg, product, min, max, over a process group."""

    reduce_op: str
    group_name: str


@dataclass(frozen=True)
class AllGatherAttrs:
    """A process group and its size."""

    group_size: int
    group_name: str


@dataclass(frozen=True)
class ReduceScatterAttrs:
    """sum, avg, product, min, max, over a process group and its size."""

    reduce_op: str
    group_size: int
    group_name: str


@dataclass(frozen=True)
class AllToAllAttrs:
    """Rows from and for each process of a group."""

    output_split_sizes: Dims
    input_split_sizes: Dims
    group_name: str


@dataclass(frozen=True)
class BroadcastAttrs:
    """From which process of a group."""

    src: int
    group_name: str
