"""The other forms of an operator: method, Python operator, aliases, in place (with its gradient), and `out=`.

A form is a function from a sample and a place (CPU or lazy) to an attempt, so that the same code runs on both.
Invariant: in-place and out forms watch the written tensor and an alias of its memory that was made before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from tests.opinfo.attempt import Attempt, compare_outcomes, observe
from tests.opinfo.batch import Case
from tests.opinfo.exceptions import EAGERS_STRIDED_OUT
from tests.opinfo.forward import UNINITIALISED, gradients
from tests.opinfo.report import describe
from tests.opinfo.samples import Call, name_of, on_cpu, on_lazy, samples_of, seed, supports, widened

Place = Callable[[Any], Any]
Form = Callable[[SampleInput, Place], "Attempt | None"]


def variant_cases(op: OpInfo, dtype: torch.dtype, limit: int) -> list[Case]:
    """Every form of every sample; forms that a sample does not have are left out."""
    cases: list[Case] = []
    for number, sample in enumerate(samples_of(op, dtype, gradient=False, limit=limit)):
        forms = [*_calls(op, sample), *_in_place(op), *_outs(op, sample)]
        cases += _cases(op, number, sample, forms)
    if op.get_inplace() is not None and op.supports_inplace_autograd and supports(op, dtype, gradient=True):
        for number, sample in enumerate(samples_of(op, dtype, gradient=True, limit=limit)):
            cases += _cases(op, number, sample, [("in place, gradient", _in_place_gradient(op, op.get_inplace()))])
    return cases


def _cases(op: OpInfo, number: int, sample: SampleInput, forms: list[tuple[str, Form]]) -> list[Case]:
    return [case for label, form in forms if (case := _case(op, number, sample, label, form)) is not None]


def _case(op: OpInfo, number: int, sample: SampleInput, label: str, form: Form) -> Case | None:
    def run(place: Place) -> Any:
        seed(name_of(op), number)
        attempt = form(sample, place)
        return None if attempt is None else observe(attempt)

    want = run(on_cpu)
    if want is None:
        return None

    def check(have: Any) -> bool:
        return compare_outcomes(have, want, values=op.name not in UNINITIALISED, exact=lambda: run(widened).values)

    return Case(number, describe(sample), lambda: run(on_lazy), check, label)


# ---- methods, operators, aliases


def _calls(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Form]]:
    functions = [("method", op.get_method())]
    if not sample.kwargs and len(sample.args) <= 1:
        functions.append(("operator", op.get_operator()))
    for alias in op.aliases:
        functions += [(f"alias {alias.name}", alias.op), (f"alias method {alias.name}", alias.method_variant)]
    for label, function in functions:
        if function is not None:
            yield label, _plain(op, function)


def _plain(op: OpInfo, function: Callable[..., Any]) -> Form:
    def form(sample: SampleInput, place: Place) -> Attempt:
        call = Call(op, sample, place)
        return Attempt(lambda: function(call.input, *call.args, **call.kwargs))

    return form


# ---- in place


def _in_place(op: OpInfo) -> Iterator[tuple[str, Form]]:
    functions = [("in place", op.get_inplace()), ("in-place operator", op.get_inplace_operator())]
    functions += [(f"in-place alias {alias.name}", alias.inplace_variant) for alias in op.aliases]
    for label, function in functions:
        if function is not None:
            yield label, _writing(op, function, is_operator="operator" in label)


def _writing(op: OpInfo, function: Callable[..., Any], is_operator: bool) -> Form:
    def form(sample: SampleInput, place: Place) -> Attempt | None:
        if is_operator and (sample.kwargs or len(sample.args) != 1):
            return None
        call = Call(op, sample, place)
        if not isinstance(call.input, torch.Tensor) or call.input.layout is not torch.strided:
            return None
        return Attempt(lambda: function(call.input, *call.args, **call.kwargs), (call.input, call.input.detach()))

    return form


def _in_place_gradient(op: OpInfo, function: Callable[..., Any]) -> Form:
    def form(sample: SampleInput, place: Place) -> Attempt | None:
        call = Call(op, sample, place)
        if not isinstance(call.input, torch.Tensor) or not call.leaves:
            return None

        def run() -> Any:
            written = call.input.clone()
            result = function(written, *call.args, **call.kwargs)
            return result is written, gradients(call.process(result), call.leaves)

        return Attempt(run)

    return form


# ---- out=


def _outs(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Form]]:
    if not op.supports_out:
        return
    try:
        seed(name_of(op))
        expected = Call(op, sample, on_cpu)()
    except Exception:
        return  # eager does not run this sample
    tensors = pytree.tree_leaves(expected)
    if not tensors or not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in tensors):
        return
    is_one = isinstance(expected, torch.Tensor)
    for label, make in _OUTS.items():
        if make is _strided and op.name in EAGERS_STRIDED_OUT:
            continue
        yield f"out {label}", _with_out(op, [_Like(t) for t in tensors], is_one, make)
    if any(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors):
        yield "out with gradient", _with_out(op, [_Like(t) for t in tensors], is_one, _same, gradient=True)


class _Like:
    """Shape and dtype of an expected result."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _with_out(op: OpInfo, likes: list[_Like], is_one: bool, make: Any, gradient: bool = False) -> Form:
    def form(sample: SampleInput, place: Place) -> Attempt | None:
        made = [make(like) for like in likes]
        if any(m is None for m in made):
            return None
        call = Call(op, sample, place)
        outs, watched = [], []
        for memory, window in made:
            kept = place(memory)
            out = kept if window is None else window(kept)
            outs.append(out)
            watched += [out] if out is kept else [out, kept]
        if gradient:
            for out in outs:
                if out.dtype.is_floating_point or out.dtype.is_complex:
                    out.requires_grad_()
        target = outs[0] if is_one else tuple(outs)
        return Attempt(lambda: call.function(call.input, *call.args, **call.kwargs, out=target), watched, whole=False)

    return form


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory that holds something, so that what is left of it shows."""
    return (torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) % 3).to(dtype)


def _same(like: _Like) -> Any:
    return _filled(like.shape, like.dtype), None


def _strided(like: _Like) -> Any:
    """Every second element of a transposed memory."""
    if not like.shape:
        return _filled((3,), like.dtype), lambda memory: memory[1]
    shape = (*reversed(like.shape[:-1]), 2 * like.shape[-1])
    last = len(shape) - 1
    dims = (*reversed(range(last)), last)
    return _filled(shape, like.dtype), lambda memory: memory.permute(dims)[..., 1::2]


def _empty(like: _Like) -> Any:
    return torch.empty(0, dtype=like.dtype), None


def _larger(like: _Like) -> Any:
    return _filled((*like.shape, 2), like.dtype), None


def _smaller(like: _Like) -> Any:
    return (_filled((1,), like.dtype), None) if math.prod(like.shape) > 1 else None


def _narrower(like: _Like) -> Any:
    if like.dtype == torch.bool:
        return None
    wanted = torch.int64 if like.dtype.is_floating_point or like.dtype.is_complex else torch.bool
    return _filled(like.shape, wanted), None


_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.float64: torch.complex128, torch.complex64: torch.complex128, torch.bool: torch.int64,
    torch.uint8: torch.int64, torch.int32: torch.int64, torch.int64: torch.float32,
}  # fmt: skip


def _wider(like: _Like) -> Any:
    wanted = _WIDER.get(like.dtype)
    return None if wanted is None else (_filled(like.shape, wanted), None)


_OUTS = {
    "of the right size": _same, "strided": _strided, "empty": _empty, "larger": _larger, "smaller": _smaller,
    "narrower dtype": _narrower, "wider dtype": _wider,
}  # fmt: skip
