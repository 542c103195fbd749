"""What can be seen after a call, and the first thing that differs between two ways to run it.

Invariant: what is seen holds copies of values, so that later calls change nothing of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

Seen = list[tuple[str, Any, Any]]  # (place, value or facts, numbers of a tensor) for each thing seen
_TOLERANCE = {
    torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-8, torch.complex64: 2e-5,
}  # fmt: skip
_UNKNOWN = "unknown"


class Difference(NamedTuple):
    """The first thing that differs: of which kind ("values", "strides", "raised"), and in words."""

    kind: str
    text: str


def leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What lies in containers, with its place; a tensor's gradient behind the tensor."""
    if isinstance(value, torch.Tensor):
        yield place, value
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")  # of tensors that are no leaves
            if value.grad is not None:
                yield f"{place}.grad", value.grad
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{place}.{name}")
    elif isinstance(value, (list, tuple, deque)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{place}[{number}]")
    elif hasattr(value, "__dataclass_fields__"):
        yield from leaves(vars(value), f"{place}:{type(value).__name__}")
    else:
        yield place, value


def _facts(place: str, t: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": tuple(t.shape), "dtype": t.dtype}
    if t.numel():
        found["strides"] = tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1)
        found["offset"] = t.storage_offset()
    if place.startswith("argument") and not place.endswith(".grad"):
        found["version"] = t._version
    try:
        found |= {"requires_grad": t.requires_grad, "is_leaf": t.is_leaf}
    except RuntimeError:  # an older view of what was written to, of which torch tells no more
        found["requires_grad"] = found["is_leaf"] = _UNKNOWN
    return found


def seen(items: list[tuple[str, Any]]) -> Seen:
    """(place, value or facts, numbers of a tensor) for each item."""
    first: dict[tuple[bool, int], str] = {}
    facts: Seen = []
    for place, value in items:
        if isinstance(value, torch.Tensor):
            facts.append((place, {**_facts(place, value), "first seen": _first(first, place, value)}, value))
        else:
            facts.append((place, value, None))
    return [(place, fact, None if t is None else _numbers(t)) for place, fact, t in facts]


def _first(first: dict[tuple[bool, int], str], place: str, t: torch.Tensor) -> str:
    """Where the same object was seen first: among arguments and results, or in the state. Replays may give a gradient,
    or what the state holds, as another tensor on the same memory."""
    return place if place.endswith(".grad") else first.setdefault((place.startswith(".S"), id(t)), place)


def _numbers(t: torch.Tensor) -> torch.Tensor:
    return t.detach().cpu().resolve_conj().resolve_neg().clone()


def objects(items: list[tuple[str, Any]]) -> list[str]:
    """The place of each tensor, once for each object."""
    return list({id(t): place for place, t in reversed(items) if isinstance(t, torch.Tensor)}.values())


def write_to_all(items: list[tuple[str, Any]], places: list[str]) -> Seen:
    """Every tensor at these places one more; whether that raised, and what all of them hold then."""
    raised, at = [], dict(items)
    with torch.no_grad():
        for place in places:
            t = at.get(place)
            try:
                if isinstance(t, torch.Tensor):
                    t.logical_not_() if t.dtype is torch.bool else t.add_(1)
            except RuntimeError:
                raised.append(place)
    values = [(f"{place}, written to", None, _numbers(t)) for place, t in items if isinstance(t, torch.Tensor)]
    return [("raised when written to", sorted(raised), None), *values]


def difference(have: Seen, want: Seen, ignored: tuple[str, ...] = ()) -> Difference | None:
    """The first thing that differs, but for ignored facts; facts come before numbers."""
    mine, theirs = [place for place, *_ in have], [place for place, *_ in want]
    raised = [dict((place, fact) for place, fact, _ in side).get("raised") for side in (have, want)]
    if raised[0] != raised[1]:
        return Difference("raised", f"raised {raised[0]}, eagerly {raised[1]}")
    if mine != theirs:
        only = sorted({*mine} - {*theirs}), sorted({*theirs} - {*mine})
        return Difference("places", f"only ours {only[0]}, only eager's {only[1]}")
    for (place, fact, _), (_, expected, _) in zip(have, want, strict=True):
        if isinstance(expected, dict) and isinstance(fact, dict):
            wrong = [
                f"{name} is {fact.get(name)}, eagerly {expected[name]}"
                for name in expected
                if name not in ignored
                and fact.get(name) != expected[name]
                and _UNKNOWN not in (fact.get(name), expected[name])
            ]
            if wrong:
                return Difference(wrong[0].split(" is ")[0], f"{place}: {'; '.join(wrong)}")
        elif not _is_same(fact, expected):
            return Difference("told", f"{place}: {fact}, eagerly {expected}")
    for (place, _, values), (_, _, expected) in zip(have, want, strict=True):
        if expected is not None:
            near = _TOLERANCE.get(expected.dtype, 0.0)
            if not torch.allclose(values, expected, rtol=near, atol=near, equal_nan=True):
                kind = "memory" if place.endswith("written to") else "values"
                return Difference(
                    kind, f"{place}: {values.flatten()[:8].tolist()}, eagerly {expected.flatten()[:8].tolist()}"
                )
    return None


def _is_same(fact: Any, expected: Any) -> bool:
    """Equal, where NaN equals NaN and the order of sums may show in a float."""
    if type(fact) is not type(expected) and not isinstance(expected, torch.Size):
        return False
    if isinstance(expected, float):
        return fact == expected or (fact != fact and expected != expected) or abs(fact - expected) <= 2e-5 + 2e-5 * abs(
            expected
        )  # fmt: skip
    if isinstance(expected, (list, tuple)):
        return len(fact) == len(expected) and all(map(_is_same, fact, expected))
    if isinstance(expected, torch.Tensor):
        return torch.equal(fact, expected)
    return bool(fact == expected)
