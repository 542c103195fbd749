"""A call that may raise, and what it does to tensors that the caller holds.

Invariant: what is observed on the lazy device is judged against what is observed eagerly on the CPU, nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.opinfo.compare import Difference, compare
from tests.opinfo.report import text_of


@dataclass(frozen=True)
class Attempt:
    """A call, ready to be made, and the tensors that it may write to (with their aliases)."""

    call: Callable[[], Any]
    watched: Sequence[torch.Tensor] = ()
    whole: bool = True  # an error leaves the watched tensors as they were; eager may leave an `out=` resized


@dataclass(frozen=True)
class Outcome:
    """What a call did: the result and the watched tensors, which of them is which, or the exception."""

    values: Any
    facts: tuple[Any, ...]
    error: Exception | None
    warned: bool = False  # that an output was resized
    grew: bool = False  # whether one was


def observe(attempt: Attempt) -> Outcome:
    """Make the call."""
    before = [t.shape for t in attempt.watched]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, error = None, None
        try:
            result = attempt.call()
        except Exception as failure:
            error = failure
    warned = any("was resized" in str(w.message) for w in caught)
    same = tuple(_place(leaf, attempt.watched) for leaf in pytree.tree_leaves(result))
    grads = tuple(t.requires_grad for t in attempt.watched)
    if error is not None and not attempt.whole:
        return Outcome((), (), error)
    grew = before != [t.shape for t in attempt.watched]
    return Outcome((result, list(attempt.watched)), (same, grads), error, warned, grew)


def _place(leaf: Any, watched: Sequence[torch.Tensor]) -> int | None:
    return next((i for i, tensor in enumerate(watched) if tensor is leaf), None)


def compare_outcomes(have: Outcome, want: Outcome, **options: Any) -> bool:
    """Raise a Difference where a call did not do what eager's did; options are those of `compare`."""
    if have.error is not None or want.error is not None:
        compare_errors(have.error, want.error)
    if have.facts != want.facts:
        raise Difference("alias", f"(same objects, requires_grad) is {have.facts}, eager's {want.facts}")
    if have.warned != want.warned and (have.warned or want.grew):  # eager's matmul warns where nothing is resized
        raise Difference("warning", f"{'warns' if have.warned else 'does not warn'} of a resized output, unlike eager")
    return compare(have.values, want.values, **options)


def compare_errors(have: Exception | None, want: Exception | None) -> None:
    """Eager's type of exception, or a Difference."""
    if have is None:
        raise Difference("error", f"no error, eager raises {text_of(want) if want else want}")
    if want is None:
        raise Difference("error", f"raises {text_of(have)}; eager does not")
    if type(have) is not type(want):
        raise Difference("error", f"raises {text_of(have)}; eager {text_of(want)}")
