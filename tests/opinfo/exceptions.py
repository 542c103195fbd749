"""Failures that are known and stay: which operator, in which readings, what differs, and whose doing it is.

Invariant: an entry excuses one kind of difference of one operator and nothing else; a value is excused only where
eager's own digits are noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A difference that is not ours to mend."""

    op: str
    readings: str  # letters
    kinds: tuple[str, ...]
    cause: str
    upstream: str  # what in torch makes it so
    dtypes: tuple[str, ...] = ()  # none: all

    def covers(self, result: dict[str, Any], kind: str) -> bool:
        """Whether a failure of this kind in `result` is this one."""
        return (
            result["op"] == self.op
            and result["reading"] in self.readings
            and kind in self.kinds
            and (not self.dtypes or result["dtype"] in self.dtypes)
        )


KNOWN: tuple[Known, ...] = (
    Known(
        "ormqr",
        "ci",
        ("stride",),
        "the gradient is row-major, eager's column-major",
        "householder_product_backward writes in place unless a tensor is of a subclass (areAnyTensorSubclassLike)",
    ),
    Known(
        "tensordot",
        "c",
        ("stride",),
        "gradients of a full contraction of halves lie as those of a matrix product, eager's as those of mul and sum",
        "tensordot chooses between the two by device type and dtype",
        ("bfloat16", "float16"),
    ),
    Known(
        "nn.functional.normalize",
        "c",
        ("value",),
        "along a dimension of size 1 the gradient is 0, and all that is left is the rounding of two terms that cancel",
        "none: the formula is ill-conditioned in a half, in eager too",
        ("bfloat16", "float16"),
    ),
    Known(
        "masked.normalize",
        "c",
        ("value",),
        "of a single element the gradient is 0, and all that is left is the rounding of two terms that cancel",
        "none: the formula is ill-conditioned in a half, in eager too",
        ("bfloat16", "float16"),
    ),
    Known(
        "linalg.solve_triangular",
        "c",
        ("stride",),
        "the gradient of one column has the stride of a column-major matrix along its dimension of size 1",
        "its backward writes through out= or not by whether a tensor is of a subclass; no element is addressed by it",
        ("complex64",),
    ),
    Known(
        "pow",
        "c",
        ("value",),
        "terms of a summed gradient overflow the half: the sum is infinite, eager's is NaN",
        "none: eager rounds each term to the half first",
        ("float16",),
    ),
    *[
        Known(
            name,
            "c",
            ("value",),
            "the gradient of the 0-dim operand sums halves of opposite signs; ours sums them before they are rounded",
            "none: eager rounds each term to the half first",
            ("float16",),
        )
        for name in ("div.no_rounding_mode", "true_divide", "remainder", "logaddexp", "hypot")
    ],
    *[
        Known(
            f"jiterator_{name}",
            "h",
            ("record",),
            "a function of torch.cuda.jiterator launches its kernel without an operator that could be recorded",
            "it is given tensors of its own device only, and asks nobody for those of others",
        )
        for name in ("unary", "binary", "binary_return_by_ref", "2inputs_2outputs", "4inputs_with_extra_args")
    ],
    Known(
        "torch.ops.aten._efficient_attention_forward",
        "h",
        ("value",),
        "the seed and offset that it returns without dropout are not set: they differ from call to call",
        "none: nobody reads them without dropout",
    ),
    Known(
        "torch.ops.aten._efficient_attention_forward",
        "i",
        ("stride",),
        "gradients lie row-major, eager's as the kernel's (batch, length, heads, width)",
        "none: not looked into",
    ),
    Known(
        "torch.ops.aten._flash_attention_forward",
        "h",
        ("value",),
        "the seed and offset that it returns without dropout are not set: they differ from call to call",
        "none: nobody reads them without dropout",
    ),
    Known(
        "nn.functional.scaled_dot_product_attention",
        "h",
        ("stride",),
        "with a mask, or causal with other lengths, halves lie as the memory-efficient kernel's (batch, length, heads, "
        "width), eager's as the query",
        "which kernel eager takes is a matter of the GPU: on an H200 it is cuDNN's",
        ("bfloat16", "float16"),
    ),
    Known(
        "nn.functional.layer_norm",
        "i",
        ("value",),
        "of a single element the gradient is 0, and all that is left is the rounding of two terms that cancel",
        "none: the formula is ill-conditioned",
        ("float32",),
    ),
    Known(
        "nn.functional.scaled_dot_product_attention",
        "i",
        ("stride",),
        "with a mask that wants a gradient it is computed by its parts here, and gradients lie row-major",
        "none: the fused kernel that eager takes gives the mask's gradient too",
    ),
)

# What eager's own kernels do with an `out=` that is not row-major: it is no reference there. Ours gets the values.
EAGERS_STRIDED_OUT: dict[str, str] = {
    "tril": "writes beyond the memory of a batch (and crashes some time later)",
    "triu": "writes beyond the memory of a batch (and crashes some time later)",
    "lu_unpack": "writes beyond its memory: it calls tril and triu",
    "linalg.lu": "writes beyond its memory: it calls lu_unpack",
    "nn.functional.avg_pool3d": "is filled as if it were row-major: wrong values",
    "matmul": "of a vector and a matrix is resized to be row-major, with a warning, although it has the right size",
    "narrow_copy": "is filled as if it were row-major: wrong values",
}


def is_known(result: dict[str, Any], kind: str) -> Known | None:
    """The entry that excuses a failure, or None."""
    return next((known for known in KNOWN if known.covers(result, kind)), None)
