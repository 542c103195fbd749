"""The readings: what is run of an operator, by which engine, and how each of them becomes a report.

Invariant: every sample that eager runs (and, of error inputs, refuses) ends as passed or as one Failure.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torchlazy
from torch.testing._internal.opinfo.core import OpInfo

from tests.opinfo.batch import run_cases
from tests.opinfo.engines import engine
from tests.opinfo.error_inputs import error_cases
from tests.opinfo.forward import forward_cases
from tests.opinfo.joint import check_cases, joint_cases
from tests.opinfo.precision import precision_cases, steps
from tests.opinfo.report import Report
from tests.opinfo.samples import name_of, supports
from tests.opinfo.variants import variant_cases


@dataclass(frozen=True)
class Reading:
    """What is run of an operator, and by what."""

    about: str
    engine: str
    gradient: bool = False
    device: str = "cpu"  # where programs and eager run


READINGS = {
    "a": Reading("the primitives' eager references, forward", "prims"),
    "b": Reading("the lazy device through the compiler, forward", "compiler"),
    "c": Reading("the lazy device through the compiler, gradients", "compiler", gradient=True),
    "d": Reading("methods, operators, aliases, in-place and `out=` forms on the lazy device", "compiler"),
    "e": Reading("the database's error inputs on the lazy device", "compiler"),
    "p": Reading("chains of pointwise operators with `config.precision = 'eager'`, bit by bit", "compiler"),
    "f": Reading(
        "results and gradients by the joint graph, forward and backward as two programs", "prims", gradient=True
    ),
    "g": Reading("torch's gradcheck and gradgradcheck of the joint graph", "prims", gradient=True),
    "h": Reading("programs for a GPU (Triton) against eager on that GPU, forward", "compiler", device="cuda"),
    "i": Reading("programs for a GPU, gradients", "compiler", gradient=True, device="cuda"),
}


def has_reading(op: OpInfo, reading: str, dtype: torch.dtype) -> bool:
    """Whether there is anything of `op` to run in this reading and dtype. Error inputs have the dtypes they have."""
    if reading == "e":
        return op.error_inputs_func is not None and dtype == torch.float32
    if reading == "p":
        return dtype in (torch.bfloat16, torch.float16) and name_of(op) in steps(dtype)
    if reading == "d":
        forms = (op.get_method(), op.get_inplace(), op.get_operator(), op.supports_out or None, *op.aliases)
        return supports(op, dtype) and any(form is not None for form in forms)
    return supports(op, dtype, gradient=READINGS[reading].gradient, device=READINGS[reading].device)


def run_reading(op: OpInfo, reading: str, dtype: torch.dtype, *, limit: int, through: str | None = None) -> Report:
    """All samples of `op`, or `limit` of them; `through` names another engine than the reading's own."""
    report = Report(name_of(op), reading, str(dtype).removeprefix("torch."), limit)
    device = READINGS[reading].device
    torchlazy.set_target(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reading == "d":
            cases = variant_cases(op, dtype, limit)
        elif reading == "e":
            cases = error_cases(op, report)
        elif reading == "p":
            cases = precision_cases(op, dtype, limit)
        elif reading == "f":
            cases = joint_cases(op, dtype, limit, report)
        elif reading == "g":
            cases = check_cases(op, dtype, limit, report)
        else:
            cases = forward_cases(op, dtype, READINGS[reading].gradient, limit, report, device)
        with engine(through or READINGS[reading].engine, "eager" if reading == "p" else None):
            # Errors of the values come with the next cut: each error input has one of its own.
            run_cases(cases, report, **({"batch": 1} if reading in "efg" else {}))
    return report
