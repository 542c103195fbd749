"""The scalar language of loop bodies.

A loop body is a Python function over an `OpsHandler`; what the handler is decides what the body means: printed,
analysed for its reads, counted, or turned into C++, Numba or Triton. The handler is always a parameter.

Types inside a body: every value has one torch dtype, known to the handler. float16 and bfloat16 live only in memory:
`load` widens them to float32 and `store` narrows (each handler does so by itself), so an arithmetic op only
ever sees bool, intN, uint8, float32 or float64. `to_dtype(x, bfloat16)` *rounds* to that precision and
yields a float32 value. Binary ops take operands of one dtype and return that dtype (comparisons return bool); nothing
promotes implicitly.

Invariant: the names in `POINTWISE_OPS` are exactly the methods each back end implements (tests/inductor checks it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import sympy
import torch

T = TypeVar("T")

ReductionKind = Literal["sum", "prod", "max", "min", "argmax", "argmin", "any", "all", "welford"]

# name: number of value operands
UNARY_OPS = (
    "neg", "abs", "sign", "ceil", "floor", "trunc", "round",  # round: half to even
    "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "erf", "erfc", "erfinv", "lgamma", "isnan", "isinf", "signbit", "logical_not", "bitwise_not",
)  # fmt: skip
BINARY_OPS = (
    "add", "sub", "mul", "div",  # div: true division, floats only
    "floor_div",  # Python's //, ints and floats
    "trunc_div",  # C's /, ints; trunc(a / b), floats
    "remainder",  # Python's %: sign of the divisor
    "fmod",  # C's %: sign of the dividend
    "pow", "atan2", "copysign", "hypot", "nextafter",
    "maximum", "minimum",  # a NaN in either operand wins, as torch.maximum
    "fmax", "fmin",  # a NaN loses, as torch.fmax
    "eq", "ne", "lt", "le", "gt", "ge",
    "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right",  # bool too for and/or/xor
)  # fmt: skip
TERNARY_OPS = ("where",)  # where(bool condition, a, b)
POINTWISE_OPS = UNARY_OPS + BINARY_OPS + TERNARY_OPS
MEMORY_OPS = (
    "load", "store", "scalar", "constant", "index_expr", "indirect", "masked", "to_dtype", "bitcast", "random_bits",
)  # fmt: skip


class OpsHandler(Protocol[T]):
    """What a loop body may ask for beside `POINTWISE_OPS` (which are methods of one to three values)."""

    def load(self, name: str, index: sympy.Expr) -> T:
        """Element `index` (in elements from the start of buffer `name`) as a value; halves are widened."""

    def store(self, name: str, index: sympy.Expr, value: T) -> None:
        """Write `value` to element `index` of buffer `name`, converting to the buffer's dtype."""

    def scalar(self, name: str, dtype: torch.dtype) -> T:
        """The runtime scalar `name` (passed as double or int64) converted to `dtype`."""

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> T:
        """A literal; nan and the infinities are legal for floats."""

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> T:
        """An index expression as a value (int64 or int32, or any dtype that it converts to)."""

    def indirect(self, value: T, size: sympy.Expr, what: str) -> sympy.Expr:
        """A symbol standing for the integer `value` used as an index into a dimension of `size`.

        Negative values wrap by `size`. What is out of range after that must not read or write out of bounds: CPU back
        ends raise IndexError naming `what`, Triton clamps and traps.
        """

    def masked(self, condition: T, body: Callable[[], T], other: bool | int | float) -> T:
        """`body()` where `condition` holds, else `other`; loads in `body` must not touch memory where it doesn't."""

    def to_dtype(self, value: T, dtype: torch.dtype) -> T:
        """Convert as `Tensor.to` does: float to int truncates, anything to bool is `!= 0`, to a half rounds."""

    def bitcast(self, value: T, dtype: torch.dtype) -> T:
        """Reinterpret the bits; both dtypes have one size, no halves."""

    def random_bits(self, seed: T, stream: T, counter: T) -> T:
        """32 random bits as int32: word 0 of Philox4x32-10.

        key = (low, high 32 bits of int64 `seed`), counter = (low, high of int64 `counter`, `stream`, 0), stream int32.
        """


# A body takes the handler, one index expression for each parallel range and one for each reduction range.
Body = Callable[[OpsHandler, "tuple[sympy.Expr, ...]", "tuple[sympy.Expr, ...]"], T]
