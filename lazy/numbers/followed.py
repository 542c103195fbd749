"""Which number arguments of an operator are inputs of a captured call's programs, where the capture tracks them.

Learning rates and factors are inputs of every program (`op_schema`). Others (an epsilon, a slope, the p of a dropout)
are constants of most programs; within a captured call one that changes from call to call becomes an input too.

Invariant: a number is an input only where everything that the operator, its handler and its backward compute from it is
known here: the number itself once more (`BACKWARD_GETS`), or expressions of it (`derived`). Elsewhere a call with
gradients is captured for each value. Comparisons of the value in a handler or in eager are in `questions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchlazy.lazy.numbers.expr import Applied, Expression
from torchlazy.lazy.trace.number_arguments import (
    BACKWARD_GETS,
    BACKWARDS,
    BATCH_NORMS,
    DERIVED_AGAIN,
    HANDLED,
    WITHOUT_GRADIENT,
)

_LIMITS: dict[tuple[str, str], tuple[tuple[str, float], ...]] = {
    ("native_dropout", "p"): (("le", 0.0), ("ge", 1.0)),
    ("bernoulli", "p"): (("lt", 0.0), ("gt", 1.0)),
    ("normal", "std"): (("lt", 0.0), ("eq", 1.0)),
    ("normal", "mean"): (("eq", 0.0),),
    ("uniform", "to"): (("le", 0.0), ("eq", 1.0)),
    ("huber_loss", "delta"): (("le", 0.0),),
    ("smooth_l1_loss", "beta"): (("le", 0.0),),
    ("softplus", "beta"): (("eq", 0.0),),
    ("elu_backward", "alpha"): (("lt", 0.0),),
    ("leaky_relu_backward", "negative_slope"): (("lt", 0.0),),
}


def is_handled(base: str) -> bool:
    """Whether it is known that the recorder's handler of the operator computes nothing else from its numbers."""
    return base in HANDLED or base in BATCH_NORMS


def may_be_followed(base: str, args: Sequence[Any]) -> bool:
    """Whether the other arguments let the numbers be inputs: a uniform range must begin at zero."""
    return base != "uniform" or len(args) < 2 or args[1] == 0


def stays_known(base: str, name: str) -> bool:
    """Whether the number may be an input although gradients are wanted."""
    return base == "native_dropout" or name not in WITHOUT_GRADIENT.get(base, ())


def derived(base: str, value: float, expression: Expression) -> Iterator[tuple[float, Expression]]:
    """Numbers that the operator's handler computes from this one, with their expressions."""
    if base == "native_dropout" and value not in (0.0, 1.0):
        yield 1.0 / (1.0 - value), Applied("truediv", (1.0, Applied("sub", (1.0, expression))))


def backward_of(base: str) -> str:
    """The operator that gets the number again in the backward; empty where there is none."""
    if base in BACKWARD_GETS:
        return BACKWARD_GETS[base][1]
    return "native_dropout_backward" if base == "native_dropout" else ""


def is_again(base: str) -> bool:
    """Whether the operator is a backward that gets numbers of its forward as plain ones."""
    return base in BACKWARDS or base in DERIVED_AGAIN


def questions(base: str, name: str, value: Any, expression: Expression) -> Iterator[tuple[Expression, bool]]:
    """Comparisons of the number in the operator, or its handler, with their outcomes."""
    for comparison, limit in _LIMITS.get((base, name), ()):
        answer = {"le": value <= limit, "lt": value < limit, "ge": value >= limit, "gt": value > limit,
                  "eq": value == limit}[comparison]  # fmt: skip
        yield Applied(comparison, (expression, limit)), answer


__all__ = ["backward_of", "derived", "is_again", "is_handled", "may_be_followed", "questions", "stays_known"]
