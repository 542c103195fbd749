"""Cases of one operator, recorded one after the other, run as one program, then compared.

Invariant: every case ends as passed or as one Failure. Where the common program fails, each case runs for itself, to
tell which of them is to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchlazy
from torchlazy.lazy.api import driver, recorder

from tests.opinfo.compare import Difference
from tests.opinfo.report import Failure, Report, text_of

BATCH = 24  # cases in one program


def _compile(error: BaseException) -> str:
    return "compile"


@dataclass(frozen=True)
class Case:
    """One call on the lazy device, and what is expected of it.

    `record` makes the call and returns what `check` takes once the values are there; `check` raises a Difference, and
    returns whether all values are within the dtype's tolerance. `at_sync` names the kind of an error that the cut
    raises, None where it is the one that was expected.
    """

    number: int
    about: str
    record: Callable[[], Any]
    check: Callable[[Any], bool]
    label: str = ""
    at_sync: Callable[[BaseException], str | None] = _compile


def run_cases(cases: list[Case], report: Report, batch: int = BATCH) -> None:
    """Run the cases in batches and enter their outcome into the report."""
    for start in range(0, len(cases), batch):
        _run_batch(cases[start : start + batch], report)
        driver.forget()


def _run_batch(cases: list[Case], report: Report) -> None:
    have: dict[int, Any] = {}
    failed: dict[int, Failure] = {}
    for i, case in enumerate(cases):
        try:
            have[i] = case.record()
        except Exception as error:
            failed[i] = _failure(case, "record", text_of(error))
    try:
        torchlazy.sync()
    except Exception as error:
        _discard()
        if len(cases) > 1:
            have.clear()
            for case in cases:
                _run_batch([case], report)
            return
        kind = cases[0].at_sync(error)
        if kind is None:
            report.late += 1
            return
        failed[0] = _failure(cases[0], kind, text_of(error))
    for i, case in enumerate(cases):
        failure = failed.get(i) or _check(case, have[i], report)
        if failure is not None:
            report.failures.append(failure)
            continue
        report.passed += 1
        if case.label:
            report.counts[case.label] += 1


def _check(case: Case, have: Any, report: Report) -> Failure | None:
    try:
        plain = case.check(have)
    except Difference as difference:
        return _failure(case, difference.kind, str(difference))
    except Exception as error:
        _discard()
        return _failure(case, "run", text_of(error))
    report.by_exact += not plain
    return None


def _failure(case: Case, kind: str, text: str) -> Failure:
    label = f"{case.label}: " if case.label else ""
    return Failure(case.number, kind, f"{label}{text} [{case.about}]")


def _discard() -> None:
    """Forget what a failed program left in the trace."""
    recorder._start_trace()
