"""The samples of an operator through their joint graph: forward and backward recorded ahead of time, run as programs.

Invariant: a joint is recorded from one copy of a sample's tensors and run on another one, so nothing of the recorded
call can stand in for what the programs compute. What cannot be recorded is counted with its reason, not passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree
from torchlazy.lazy.api import recorder
from torchlazy.lazy.plan.joint import CannotRecordJoint

from tests.lazy.joint_path import JointCall
from tests.opinfo.batch import Case
from tests.opinfo.compare import Difference, compare
from tests.opinfo.forward import UNINITIALISED, gradients
from tests.opinfo.report import Report, describe
from tests.opinfo.samples import Call, name_of, on_cpu, on_lazy, samples_of, seed, widened

# What gradcheck cannot judge by finite differences: the reason.
NOT_CHECKED: dict[str, str] = {
    "nn.functional.dropout": "random",
    "nn.functional.dropout2d": "random",
    "nn.functional.dropout3d": "random",
    "nn.functional.alpha_dropout": "random",
    "nn.functional.feature_alpha_dropout.with_train": "random",
    "nn.functional.feature_alpha_dropout.without_train": "random",
    "nn.functional.rrelu": "random",
    "normal": "random",
    "normal.in_place": "random",
    "uniform": "random",
    "exponential": "random",
    "cauchy": "random",
    "log_normal": "random",
    "geometric": "random",
}


@dataclass(frozen=True)
class _NotRecorded:
    reason: str


def joint_cases(op: OpInfo, dtype: torch.dtype, limit: int, report: Report) -> list[Case]:
    """Results and gradients by the joint against eager's."""
    cases = []
    for number, sample in enumerate(samples_of(op, dtype, gradient=True, limit=limit)):
        try:
            want = _eager(op, number, sample, on_cpu)
        except Exception:
            report.refused += 1
            continue
        cases.append(_equality(op, number, sample, want, report))
    return cases


def check_cases(op: OpInfo, dtype: torch.dtype, limit: int, report: Report) -> list[Case]:
    """torch's gradcheck of the joint, and gradgradcheck where the operator has second derivatives."""
    cases: list[Case] = []
    if name_of(op) in NOT_CHECKED or op.name in UNINITIALISED:
        return cases
    for number, sample in enumerate(samples_of(op, dtype, gradient=True, limit=limit)):
        try:
            _eager(op, number, sample, on_cpu)
        except Exception:
            report.refused += 1
            continue
        cases.append(_gradcheck(op, number, sample, report))
    return cases


def _eager(op: OpInfo, number: int, sample: SampleInput, place: Callable[[Any], Any]) -> Any:
    seed(name_of(op), number)
    call = Call(op, sample, place)
    return _values(call, call.process(call()))


def _values(call: Call, result: Any) -> Any:
    """The results without their history, and the gradients, whose layout is the joint's own."""
    plain = pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), result)
    return plain, pytree.tree_map_only(torch.Tensor, _dense, gradients(result, call.leaves))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _called(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _recorded(
    op: OpInfo, number: int, sample: SampleInput, double: bool, wrapper: Callable[..., Any] = _called
) -> JointCall:
    seed(name_of(op), number)
    first = Call(op, sample, on_lazy)
    joint = JointCall(
        lambda input, args, kwargs: first.process(wrapper(op.get_op(), input, *args, **kwargs)),
        orders=2 if double else 1,
    )
    try:
        joint.record((first.input, first.args, first.kwargs))
    finally:
        recorder._start_trace()  # nothing of the recorded call is computed
    return joint


def _equality(op: OpInfo, number: int, sample: SampleInput, want: Any, report: Report) -> Case:
    def record() -> Any:
        try:
            joint = _recorded(op, number, sample, double=False)
        except CannotRecordJoint as why:
            return _NotRecorded(str(why))
        seed(name_of(op), number)
        call = Call(op, sample, on_lazy)
        return _values(call, joint(call.input, call.args, call.kwargs))

    def check(have: Any) -> bool:
        if isinstance(have, _NotRecorded):
            _count(report, have.reason)
            return True
        return compare(have, want, exact=lambda: _eager(op, number, sample, widened))

    return Case(number, describe(sample), record, check)


def _gradcheck(op: OpInfo, number: int, sample: SampleInput, report: Report) -> Case:
    def run(place: Callable[[Any], Any], call_of: Callable[[Call], Callable[..., Any]]) -> Any:
        call = Call(op, sample, place)
        inner = call_of(call)
        at = {id(leaf): i for i, leaf in enumerate(call.leaves)}

        def function(*leaves: torch.Tensor) -> Any:
            def put(x: Any) -> Any:
                return leaves[at[id(x)]] if id(x) in at else x

            result = inner(*pytree.tree_map(put, (call.input, call.args, call.kwargs)))
            return tuple(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad)

        found = function(*call.leaves) if call.leaves else ()
        if not found:
            return _NotRecorded("no result has a gradient")
        if any(t.dtype not in (torch.float64, torch.complex128) or t.layout is not torch.strided for t in found):
            return _NotRecorded("a result is sparse or not in double precision")
        options = {"fast_mode": True, "nondet_tol": op.gradcheck_nondet_tol, "atol": 1e-4, "rtol": 1e-3}
        torch.autograd.gradcheck(function, call.leaves, **options)
        if op.supports_gradgrad:
            torch.autograd.gradgradcheck(function, call.leaves, **options)
        return None

    def plain(call: Call) -> Callable[..., Any]:
        return lambda input, args, kwargs: call.process(op.gradcheck_wrapper(op.get_op(), input, *args, **kwargs))

    def record() -> Any:
        second = bool(op.supports_gradgrad)
        try:
            joint = _recorded(op, number, sample, double=second, wrapper=op.gradcheck_wrapper)
            return run(on_lazy, lambda call: joint)
        except CannotRecordJoint as why:
            return _NotRecorded(str(why))
        except Exception:
            try:
                run(on_cpu, plain)
            except Exception:
                return _NotRecorded("eager fails torch's check")
            raise

    def check(have: Any) -> bool:
        if isinstance(have, _NotRecorded):
            _count(report, have.reason)
        return True

    return Case(number, describe(sample), record, check)


def _count(report: Report, reason: str) -> None:
    report.counts[f"left out: {re.sub(r'[0-9]+', '#', reason)[:120]}"] += 1


__all__ = ["Difference", "check_cases", "joint_cases"]
