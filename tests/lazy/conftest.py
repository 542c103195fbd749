"""Every test of the recorder starts with an empty trace, no known programs, zero counts and default settings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.compiled import families, race
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.run.programs import KnownTrace
from torchlazy.lazy.trace.trace import CutTrace

from tests.lazy.held_jobs import HeldJobs

_SETTINGS = (
    "precision",
    "rng",
    "tiers",
    "store",
    "max_trace_length",
    "dynamic",
    "strict",
    "debug",
    "native",
    "native_device",
)


@pytest.fixture(scope="session")
def jobs_of_session() -> Iterator[HeldJobs]:
    held = HeldJobs()
    yield held
    held.close()


@pytest.fixture(scope="module", autouse=True)
def held_jobs(jobs_of_session: HeldJobs) -> Iterator[HeldJobs]:
    """What a test gives to the background is compiled where the test waits for it, else not at all."""
    kept, driver.tiers.pool = driver.tiers.pool, jobs_of_session
    yield jobs_of_session
    torchlazy.wait_for_compile()
    driver.tiers.pool = kept


@pytest.fixture(autouse=True)
def _fresh_recorder(held_jobs: HeldJobs) -> Iterator[None]:
    kept = {name: getattr(torchlazy.config, name) for name in _SETTINGS}
    torchlazy.config.store = "off"  # what an earlier run compiled proves nothing
    torch.manual_seed(0)
    driver.forget()
    if BLOCKS.library is not None:
        BLOCKS.library.forget()
    torchlazy.reset_metrics()
    yield
    with contextlib.suppress(Exception):  # what a failing test left behind is not the next test's business
        torchlazy.sync()
    driver.forget()
    held_jobs.drop()
    for name, value in kept.items():
        setattr(torchlazy.config, name, value)


@pytest.fixture(autouse=True)
def _without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are made for sizes that come once, too, however long that takes; no replay is raced."""
    monkeypatch.setattr(families, "_MOST_BINDING", float("inf"))
    monkeypatch.setattr(race, "BEGINS", 1 << 60)


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The lazy device is recorded natively, or in Python."""
    torchlazy.config.native_device = "on" if request.param == "native" else "off"
    recorder.forget_paths()
    yield request.param
    recorder.forget_paths()


@pytest.fixture
def recorded_in_python() -> None:
    """The test is about the recorder in Python: `lazy_mode` defers everything, to lazy tensors."""
    torchlazy.config.native = "off"


@pytest.fixture
def operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut of the test runs in tier 0, however often its trace was seen."""
    known: dict[Any, KnownTrace] = {}

    def look_up(trace: CutTrace, device: str, frame: str) -> tuple[KnownTrace, str]:
        return known.setdefault(trace.signature(), KnownTrace(seen=1)), "tier 0: first sight"

    monkeypatch.setattr(driver.tiers, "look_up", look_up)


@pytest.fixture
def compiled() -> None:
    """Every cut of the test is compiled at first sight; the compiler's errors are raised."""
    torchlazy.config.tiers = "off"
    torchlazy.config.strict = True


@pytest.fixture
def sizes_vary(compiled: None) -> None:
    """Every cut of the test is compiled at first sight; from the second size on one program serves all sizes."""
    torchlazy.config.dynamic = "on"


@pytest.fixture
def fresh_capture() -> Iterator[None]:
    """torch.compile captures everything anew, and a graph that our back end would leave to eager is an error."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.compile.*a graph runs eagerly")
        yield
    torch._dynamo.reset()


@pytest.fixture(params=["tier0", "compiled"])
def tier(request: pytest.FixtureRequest) -> str:
    """The test runs once operator by operator, and once through the compiler, which must not fall back."""
    request.getfixturevalue("operator_by_operator" if request.param == "tier0" else "compiled")
    return str(request.param)
