"""Calls that ask a clock, a file, or what else changes unseen, run their Python each time, and the report has the line;
code that only names these functions is captured, and what libraries ask for themselves does not count."""

from __future__ import annotations

import cProfile
import datetime
import gc
import io
import logging
import os
import pathlib
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter as now_by_another_name
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import torchlazy
from torchlazy.lazy.compiled.capture import moving_answers
from torchlazy.runtime.native.recorder_library import LIBRARY

pytestmark = pytest.mark.usefixtures("operator_by_operator")
FILE = os.path.abspath(__file__)


class Stamp(datetime.datetime):
    """A subclass, whose `now` is the same C function."""


MOVING: dict[str, Callable[[], Any]] = {
    "time": lambda: time.time(),
    "a name of its own": lambda: now_by_another_name(),
    "a computed name": lambda: getattr(time, "mono" + "tonic")(),
    "now": lambda: datetime.datetime.now().microsecond,
    "now of a subclass": lambda: Stamp.now().microsecond,
    "open": lambda: len(open(FILE).readline()),  # noqa: SIM115
    "a path": lambda: pathlib.Path(FILE).stat().st_mtime,
    "exists": lambda: os.path.exists(FILE),
    "a folder": lambda: len(os.listdir(os.path.dirname(FILE))),
    "random bytes": lambda: os.urandom(1)[0],
    "uuid": lambda: uuid.uuid4().int % 7,
    "references": lambda: sys.getrefcount(FILE),
    "the collector": lambda: gc.get_count()[0],
}
CAPTURED: dict[str, Callable[[], Any]] = {
    "a branch that is not taken": lambda: time.time() if FILE == "" else 2,
    "sleep": lambda: time.sleep(0) or 2,
    "a log": lambda: logging.getLogger("torchlazy.none").error("%s", 2) or 2,
    "an import": lambda: __import__("colorsys").ONE_THIRD,
}


def _captured(ask: Callable[[], Any], device: str) -> tuple[bool, str]:
    """Whether calls were replayed, and what was told."""
    run = torchlazy.compile(lambda x: x * float(ask()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            run(torch.ones(3).to(device))
    report = run.report()
    return report.replays + report.audits > 0, "\n".join(str(one.message) for one in told)


@pytest.mark.parametrize("library", [True, False], ids=["by the library", "in Python"])
@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("name", MOVING)
def test_what_moves_is_asked_each_time(name: str, device: str, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(library, monkeypatch)
    was_replayed, told = _captured(MOVING[name], device)
    assert not was_replayed
    assert "changes unseen" in told and "does not do the same" not in told


@pytest.mark.parametrize("library", [True, False], ids=["by the library", "in Python"])
@pytest.mark.parametrize("name", CAPTURED)
def test_what_only_names_them_is_captured(name: str, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(library, monkeypatch)
    assert _captured(CAPTURED[name], "cpu") == (True, "")
    assert sys.getprofile() is None


def _choose(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(moving_answers, "LIBRARY", type("Absent", (), {"at_once": staticmethod(lambda: None)}))
    elif LIBRARY.wait() is None:
        pytest.skip("there is no native recorder")


def test_a_profiler_keeps_its_place() -> None:
    profiler = cProfile.Profile()
    with profiler:
        assert _captured(lambda: 2, "cpu")[0]
        time.time()
    assert any("time" in str(entry.code) for entry in profiler.getstats())


def test_under_a_profiler_the_library_still_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(True, monkeypatch)
    with cProfile.Profile():
        was_replayed, told = _captured(time.time, "cpu")
    assert not was_replayed
    assert "changes unseen" in told


def test_nothing_is_watched_after_a_capture_or_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(True, monkeypatch)
    seen: list[Any] = []
    watch = LIBRARY.module.watch_calls
    assert watch([time.time, datetime.date.today, io.FileIO.read, open], seen.append)
    assert not watch([time.time], seen.append)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(time.time).result() > 0
        assert seen == []
        assert time.time() > 0
        assert Stamp.today().year > 2000  # a subclass's
        with open(FILE, "rb", buffering=0) as file:
            assert len(file.read(3)) == 3
        assert [one.__name__ for one in seen] == ["time", "today", "time", "open", "read"]  # in C, too
    finally:
        LIBRARY.module.end_watch()
    assert time.time() > 0
    assert len(seen) == 5


def test_an_error_of_who_is_told_is_raised_where_it_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _choose(True, monkeypatch)
    assert LIBRARY.module.watch_calls([time.time], lambda function: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            time.time()
    finally:
        LIBRARY.module.end_watch()


def test_an_error_in_the_call_ends_the_watch() -> None:
    run = torchlazy.compile(lambda x: x / F)
    with pytest.raises(TypeError):
        run(torch.ones(3))
    assert sys.getprofile() is None


# ---- settings that functions of libraries read


def _follows(run: Callable[[Any], Any], change: Callable[[], Any], device: str) -> None:
    """Whether calls before and after a change give what Python gives, without audits."""
    compiled, x = torchlazy.compile(run, audit=False), torch.full((3,), 2.0).to(device)
    for _ in range(5):
        assert str(compiled(x)) == str(run(x))
    change()
    assert str(compiled(x)) == str(run(x))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize(
    ("module", "name", "run"),
    [
        (F, "gelu", lambda x: getattr(F, "ge" + "lu")(x)),
        (torch, "cos", lambda x: vars(torch)["co" + "s"](x)),
        (torch.nn.functional, "silu", lambda x: getattr(torch.nn.functional, f"si{'lu'}")(x)),
    ],
    ids=["getattr", "vars", "a chain"],
)
def test_functions_by_computed_names(
    module: Any, name: str, run: Callable[[Any], Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _follows(run, lambda: monkeypatch.setattr(module, name, lambda x: x * 100), device)


def test_how_torch_prints(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_printoptions(profile="default"))
    constant = torch.tensor(1 / 3)  # how it prints is never replayed
    _follows(lambda x: (x + 1, str(constant)), lambda: torch.set_printoptions(precision=2), "cpu")


def test_how_numpy_prints(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: numpy.set_printoptions(precision=8))
    constant = numpy.full(1, 1 / 3)
    run = lambda x: (x + 1, numpy.array_str(constant))  # noqa: E731
    _follows(run, lambda: numpy.set_printoptions(precision=2), "cpu")


def test_what_becomes_of_warnings() -> None:
    def run(x: Any) -> Any:
        try:
            warnings.warn("seldom", UserWarning, stacklevel=1)
        except UserWarning:
            return x - 1
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _follows(run, lambda: warnings.simplefilter("error"), "cpu")


# ---- sizes that only C code gets


def _counted(x: torch.Tensor) -> torch.Tensor:
    count = 0
    for _ in range(x.shape[0]):
        count += 1
    return x * 2 if count > 10 else x * 3


def _summed(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[0]
    return x * 2 if sum(place for place in range(size)) > 50 else x * 3


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if len([0] * x.shape[0]) > 10 else x * 3


def _is_a_range(x: torch.Tensor) -> torch.Tensor:
    found = range(x.shape[0])
    return x * len(found) if isinstance(found, range) else x


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("run", [_counted, _summed, _repeated, _is_a_range])
def test_sizes_that_are_only_counted(run: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    compiled = torchlazy.compile(run, audit=False)
    for size in (5, 3, 7, 4, 6, 9, 8, 3, 20, 12, 4, 30, 2):
        x = torch.ones(size, 2).to(device)
        assert torch.equal(compiled(x).cpu(), run(x).cpu()), size
    assert "range" not in globals()


def test_a_range_that_is_handed_on() -> None:
    space: dict[str, object] = {}
    text = "def run(x):\n    return x * 2 if sum(map(len, map(range, x.shape))) > 10 else x * 3\n"
    exec(compile(text, __file__, "exec"), space)
    run: Any = space["run"]
    compiled = torchlazy.compile(run, audit=False)
    for size in (5, 3, 7, 4, 6, 9, 8, 3, 20, 12, 4, 30, 2):
        x = torch.ones(size, 2)
        assert torch.equal(compiled(x), run(x)), size


# ---- values that are read one by one


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_values_read_one_by_one_are_left_to_python(device: str) -> None:
    run = torchlazy.compile(lambda x: sum(float(value) for value in x))
    x = torch.arange(100.0).to(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [run(x) for _ in range(4)] == [4950.0] * 4
    assert "one by one" in str(told[0].message)
    assert not run.report().replays


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_a_few_reads_are_replayed(device: str) -> None:
    run = torchlazy.compile(lambda x: sum(float(value) for value in x[:8]))
    x = torch.arange(100.0).to(device)
    assert [run(x) for _ in range(4)] == [28.0] * 4
    assert run.report().replays + run.report().audits
