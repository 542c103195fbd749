"""The database's error inputs: where eager raises at the call, so does the lazy device, the same type of exception.

An error that lies in the values (an index out of range, a singular matrix) cannot be known before they are computed:
it is the one kind that may come at the cut, and is counted as late.
Invariant: a message counts as clear where it matches the database's pattern, or tells all that eager's tells.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo

from tests.opinfo.attempt import Attempt, Outcome, compare_errors, observe
from tests.opinfo.batch import Case
from tests.opinfo.compare import Difference
from tests.opinfo.report import Report, describe, text_of
from tests.opinfo.samples import Call, name_of, on_cpu, on_lazy, seed


def error_cases(op: OpInfo, report: Report) -> list[Case]:
    """A case for each error input that eager refuses; the others are counted."""
    seed(name_of(op))
    cases = []
    for number, error_input in enumerate(op.error_inputs("cpu")):
        want = observe(_attempt(op, error_input, on_cpu)).error
        if want is None:
            report.refused += 1
        else:
            cases.append(_case(op, number, error_input, want))
    return cases


def _attempt(op: OpInfo, error_input: ErrorInput, place: Any) -> Attempt:
    def run() -> Any:
        return Call(op, error_input.sample_input, place)()

    return Attempt(run)


def _case(op: OpInfo, number: int, error_input: ErrorInput, want: Exception) -> Case:
    def check(have: Outcome) -> bool:
        compare_errors(have.error, want)
        if not _is_clear(str(have.error), str(want), error_input.error_regex):
            raise Difference("message", f"says {text_of(have.error)!r}, eager {text_of(want)!r}")
        return True

    def at_sync(error: BaseException) -> str | None:
        return None if type(error) is type(want) and _is_about_values(error) else "late"

    def record() -> Outcome:
        return observe(_attempt(op, error_input, on_lazy))

    return Case(number, describe(error_input.sample_input), record, check, at_sync=at_sync)


def _is_clear(have: str, want: str, pattern: str) -> bool:
    return bool(re.search(pattern, have)) or _words(want) <= _words(have)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.replace("lazy", "cpu")))


def _is_about_values(error: BaseException) -> bool:
    return isinstance(error, (IndexError, torch.linalg.LinAlgError)) or "out of bounds for dimension" in str(error)
