"""Runs a function of a device eagerly on the CPU and lazily, and compares everything that a user can see.

Invariant: a function gets equal inputs on both devices (`data`, `ints`), and what it returns or raises is compared by
value, dtype, shape, strides, storage offset, version, autograd flags, and the type of an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy

Function = Callable[[str], Any]
_FACTS = ("shape", "dtype", "stride", "storage_offset", "version", "requires_grad", "is_leaf", "is_contiguous")


class Cases:
    """Functions of a device, collected by decorating them, for one parametrized test."""

    def __init__(self) -> None:
        self.functions: list[Function] = []

    def __call__(self, function: Function) -> Function:
        self.functions.append(function)
        return function

    def ignoring(self, *names: str) -> Callable[[Function], Function]:
        """A case whose results may differ in these facts."""

        def decorate(function: Function) -> Function:
            function.ignore = names  # type: ignore[attr-defined]
            return self(function)

        return decorate

    def parametrize(self) -> Any:
        """The decorator that runs a test `f` over all cases."""
        return pytest.mark.parametrize("f", self.functions, ids=lambda f: f.__name__)


def data(
    device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False
) -> torch.Tensor:
    """The same normal numbers on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.to(device).requires_grad_(grad)


def ints(device: str, *shape: int, low: int = 0, high: int = 10, seed: int = 0) -> torch.Tensor:
    """The same int64 numbers in [low, high) on every device."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def facts(tensor: torch.Tensor) -> dict[str, Any]:
    """What a tensor says about itself without being read."""
    return {
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        # What stands for a dimension of one element is never used, and torch's own kernels disagree on it.
        "stride": tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1),
        "storage_offset": tensor.storage_offset(),
        "version": None if tensor.is_inference() else tensor._version,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_contiguous": tensor.is_contiguous(),
    }


def outcome(function: Function, device: str) -> tuple[Any, BaseException | None]:
    """What the function returns or raises, with every recorded operator run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(device)
            torchlazy.sync()
    except Exception as error:
        return None, error
    return result, None


def check(
    function: Function, *, rtol: float | None = None, atol: float | None = None, ignore: tuple[str, ...] = ()
) -> None:
    """The function does on the lazy device what it does on the CPU; `ignore` names facts that may differ."""
    ignore = (*ignore, *getattr(function, "ignore", ()))
    want, want_error = outcome(function, "cpu")
    have, have_error = outcome(function, "lazy")
    if want_error is not None or have_error is not None:
        if type(want_error) is not type(have_error):
            raise AssertionError(f"eager: {_short(want_error)}, lazy: {_short(have_error)}") from have_error
        return
    compare(have, want, rtol=rtol, atol=atol, ignore=ignore)


def _short(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {str(error)[:200]}"


def compare(
    have: Any, want: Any, *, rtol: float | None = None, atol: float | None = None, ignore: tuple[str, ...] = ()
) -> None:
    """Equal structures of tensors and values."""
    pairs = list(_pairs(have, want, "result"))
    for place, mine, theirs in pairs:
        if isinstance(theirs, torch.Tensor):
            mine_facts, their_facts = facts(mine), facts(theirs)
            wrong = [n for n in _FACTS if n not in ignore and mine_facts[n] != their_facts[n]]
            assert not wrong, "; ".join(f"{place}.{n}: lazy {mine_facts[n]}, eager {their_facts[n]}" for n in wrong)
        else:
            assert mine == theirs or (mine != mine and theirs != theirs), f"{place}: lazy {mine!r}, eager {theirs!r}"
    for place, mine, theirs in pairs:
        if isinstance(theirs, torch.Tensor):
            real = mine.detach().cpu()
            torch.testing.assert_close(
                real,
                theirs.detach(),
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, place=place: f"{place}: {text}",
            )


def _pairs(have: Any, want: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(want, (list, tuple)):
        assert isinstance(have, (list, tuple)) and len(have) == len(want), f"{place}: lazy {have!r}, eager {want!r}"
        for position, (mine, theirs) in enumerate(zip(have, want, strict=True)):
            yield from _pairs(mine, theirs, f"{place}[{position}]")
    elif isinstance(want, dict):
        assert list(have) == list(want), f"{place}: lazy has {list(have)}, eager {list(want)}"
        for name in want:
            yield from _pairs(have[name], want[name], f"{place}[{name!r}]")
    else:
        assert isinstance(have, torch.Tensor) == isinstance(want, torch.Tensor), (
            f"{place}: lazy {have!r}, eager {want!r}"
        )
        yield place, have, want
