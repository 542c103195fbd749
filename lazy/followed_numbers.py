"""Which numbers among an operator's arguments are inputs of a captured call's programs, where the call follows them.

Learning rates and factors are inputs of every program (`op_plan`). Others (an epsilon, a slope, the p of a dropout) are
constants of most programs; within a captured call one that moves from call to call becomes an input too.

Invariant: a number is an input only where everything that the operator, its handler and its backward make of it is
known here: the number itself once more (`BACKWARD_GETS`), or expressions of it (`derived`). Elsewhere a call with
gradients is captured for each value. What a handler or eager asks of the value is in `questions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchlazy.lazy.capture_scalars import Applied, Expression

_BATCH_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
)  # fmt: skip
# The operator's backward does not read them, or autograd hands them on with their expression (a Scalar, not a double).
_ANYWHERE: dict[str, frozenset[str]] = {
    name: frozenset(arguments)
    for names, arguments in (
        (_BATCH_NORMS, ("momentum", "exponential_average_factor")),
        (("native_layer_norm", "native_group_norm", "_fused_rms_norm"), ("eps",)),
        (("gt", "ge", "lt", "le", "eq", "ne"), ("other",)),
        (("masked_fill",), ("value",)),
        (("where",), ("self", "other")),
        (("leaky_relu", "leaky_relu_backward"), ("negative_slope",)),
        (("elu", "elu_backward"), ("alpha", "scale", "input_scale")),
        (("threshold", "threshold_backward"), ("threshold", "value")),
        (("hardtanh", "hardtanh_backward"), ("min_val", "max_val")),
        (("softshrink", "hardshrink", "softshrink_backward", "hardshrink_backward"), ("lambd",)),
        (("softplus", "softplus_backward"), ("beta", "threshold")),
        (("linspace",), ("start", "end")),
        (("scalar_tensor",), ("s",)),
        (("_foreach_clamp_min", "_foreach_clamp_max", "_foreach_maximum", "_foreach_minimum"), ("scalar", "scalars")),
    )
    for name in names
}
# The backward reads them in another way: inputs only where no gradient is wanted.
_WITHOUT_GRADIENT: dict[str, frozenset[str]] = {
    name: frozenset(arguments)
    for names, arguments in ((("addmm", "baddbmm", "addmv", "addbmm", "addr"), ("alpha", "beta")),)
    for name in names
}
# The backward is an operator that gets the very number again, as a plain one: forward, argument, backward.
BACKWARD_GETS: dict[str, tuple[str, str]] = {
    "huber_loss": ("delta", "huber_loss_backward"),
    "smooth_l1_loss": ("beta", "smooth_l1_loss_backward"),
    "native_batch_norm": ("eps", "native_batch_norm_backward"),
    "_native_batch_norm_legit": ("eps", "native_batch_norm_backward"),
    "_native_batch_norm_legit_functional": ("eps", "native_batch_norm_backward"),
    "cudnn_batch_norm": ("epsilon", "cudnn_batch_norm_backward"),
    **{
        name: ("scale", f"{name}_backward")
        for name in (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        )
    },
}  # fmt: skip
_BACKWARDS = {backward: argument for argument, backward in BACKWARD_GETS.values()}
# What handlers of the recorder make of them is in `derived`.
_HANDLED: dict[str, frozenset[str]] = {
    "native_dropout": frozenset({"p"}),
    "bernoulli": frozenset({"p"}),
    "normal": frozenset({"mean", "std"}),
    "uniform": frozenset({"to"}),
    **{name: frozenset({argument}) for name, (argument, _) in BACKWARD_GETS.items() if "attention" in name},
}
# The backward of a dropout gets what it multiplies with.
_DERIVED_AGAIN = {"native_dropout_backward": ("scale", "native_dropout")}
_LIMITS: dict[tuple[str, str], tuple[tuple[str, float], ...]] = {
    ("native_dropout", "p"): (("le", 0.0), ("ge", 1.0)),
    ("bernoulli", "p"): (("lt", 0.0), ("gt", 1.0)),
    ("normal", "std"): (("lt", 0.0), ("eq", 1.0)),
    ("normal", "mean"): (("eq", 0.0),),
    ("uniform", "to"): (("le", 0.0), ("eq", 1.0)),
    ("huber_loss", "delta"): (("le", 0.0),),
    ("smooth_l1_loss", "beta"): (("le", 0.0),),
    ("softplus", "beta"): (("eq", 0.0),),
}


def names_followed(base: str) -> frozenset[str]:
    """Names of the arguments of operator `base` (its functional name) that may be inputs within a captured call."""
    own = _ANYWHERE.get(base, frozenset()) | _WITHOUT_GRADIENT.get(base, frozenset()) | _HANDLED.get(base, frozenset())
    if base in BACKWARD_GETS:
        own |= {BACKWARD_GETS[base][0]}
    if base in _BACKWARDS:
        own |= {_BACKWARDS[base]}
    return own | ({_DERIVED_AGAIN[base][0]} if base in _DERIVED_AGAIN else frozenset())


def is_handled(base: str) -> bool:
    """Whether the recorder's handler of the operator is known to make nothing else of its numbers."""
    return base in _HANDLED or base in _BATCH_NORMS


def may_be_followed(base: str, args: Sequence[Any]) -> bool:
    """Whether the other arguments let the numbers be inputs: a uniform range must begin at zero."""
    return base != "uniform" or len(args) < 2 or args[1] == 0


def stays_known(base: str, name: str) -> bool:
    """Whether the number may be an input although gradients are wanted."""
    return base == "native_dropout" or name not in _WITHOUT_GRADIENT.get(base, ())


def derived(base: str, value: float, expression: Expression) -> Iterator[tuple[float, Expression]]:
    """Numbers that the operator's handler computes of this one, with their expressions."""
    if base == "native_dropout" and value not in (0.0, 1.0):
        yield 1.0 / (1.0 - value), Applied("truediv", (1.0, Applied("sub", (1.0, expression))))


def backward_of(base: str) -> str:
    """The operator that gets the number again in the backward; empty where there is none."""
    if base in BACKWARD_GETS:
        return BACKWARD_GETS[base][1]
    return "native_dropout_backward" if base == "native_dropout" else ""


def is_again(base: str) -> bool:
    """Whether the operator is a backward that gets numbers of its forward as plain ones."""
    return base in _BACKWARDS or base in _DERIVED_AGAIN


def questions(base: str, name: str, value: Any, expression: Expression) -> Iterator[tuple[Expression, bool]]:
    """What the operator, or its handler, asks of the number, with the answers."""
    for comparison, limit in _LIMITS.get((base, name), ()):
        answer = {"le": value <= limit, "lt": value < limit, "ge": value >= limit, "gt": value > limit,
                  "eq": value == limit}[comparison]  # fmt: skip
        yield Applied(comparison, (expression, limit)), answer


__all__ = ["BACKWARD_GETS", "backward_of", "derived", "is_again", "is_handled", "may_be_followed", "names_followed",
           "questions", "stays_known"]  # fmt: skip
