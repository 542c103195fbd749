"""Random programs, and what the fuzzer itself promises.

`TORCHLAZY_FUZZ_SEED` is the first seed (0; "today" makes it of the date), `TORCHLAZY_FUZZ_SEEDS` how many run at most.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torchlazy

from tests.fuzz.generate import draw_program
from tests.fuzz.known import KNOWN
from tests.fuzz.program import load
from tests.fuzz.seeds import run_seeds
from tests.fuzz.shrink import shrink
from tests.fuzz.ways import WAYS, Failure, check, failures
from tests.fuzz.world import NAMES

_SEED = os.environ.get("TORCHLAZY_FUZZ_SEED") or "0"
_FIRST = int(datetime.date.today().strftime("%y%m%d000") if _SEED == "today" else _SEED)
_COUNT = int(os.environ.get("TORCHLAZY_FUZZ_SEEDS", "300"))
_SECONDS = 60.0


def test_fresh_programs_do_what_eager_does(capsys):
    jobs = 1 if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1" else 2
    result = run_seeds(_FIRST, _FIRST + _COUNT, WAYS, jobs, shrinks=True, seconds=_SECONDS)
    with capsys.disabled():
        print(f"\n{result.ran} of {_COUNT} random programs ran, from TORCHLAZY_FUZZ_SEED={_FIRST} on")
    told = [f"TORCHLAZY_FUZZ_SEED={seed}\n{one['way']}: {one['text']}\n{one['program']}" for seed, one in result.news()]
    assert not told, "\n\n".join(told)
    assert result.ran


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.reason)
def test_what_is_known_still_differs(known):
    """Else it is to leave the table."""
    program = load(known.program)
    for way in known.ways:
        found = failures(program, (way,), tier0=not known.compiled)
        assert found and known.is_it(program, found[0]), found


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_is_always_the_same_program(seed):
    program = draw_program(seed)
    assert draw_program(seed).text() == program.text()
    assert load(program.text()) == program


def _with(program, lines):
    head, _, rest = program.source.partition("told = []\n")
    return replace(program, source=f"{head}told = []\n    {lines}\n{rest}", packing=program.packing)


@pytest.mark.parametrize(
    ("way", "lines"),
    [
        ("device", "S.n += dev == 'lazy'"),
        ("device", "S.d['z'] = torch.zeros(2).t() if dev == 'lazy' else torch.zeros(2)[None]"),
        ("device", "S.shared = S.l[0] if dev == 'lazy' else S.l[0].clone()"),
        ("device", "{}['missing'] if dev == 'lazy' else 0"),
        ("mode", "S.k += torchlazy.is_lazy(torch.ones(1) + 1)"),
    ],
)
def test_a_difference_is_seen_and_shrunk(way, lines, monkeypatch):
    monkeypatch.setitem(NAMES, "torchlazy", torchlazy)
    program = _with(draw_program(3), lines)
    (found,) = failures(program, (way,))
    assert isinstance(found, Failure)

    def fails(candidate):
        other = failures(candidate, (way,))
        return bool(other) and other[0].is_like(found)

    small = shrink(program, fails, 60)
    assert fails(small) and len(small.text()) < len(program.text()) and len(small.calls) == 1


def test_what_eager_does_otherwise_each_time_is_no_find(monkeypatch):
    monkeypatch.setitem(NAMES, "seen", [])
    assert not failures(_with(draw_program(3), "S.k += len(seen); seen.append(1)"), ("mode",))


def test_a_saved_program_is_checked(monkeypatch):
    program = draw_program(4)
    check(program.text(), ("mode",))
    monkeypatch.setitem(NAMES, "torchlazy", torchlazy)
    with pytest.raises(AssertionError, match="mode, call 0"):
        check(_with(program, "S.k += torchlazy.is_lazy(torch.ones(1) + 1)").text(), ("mode",))


@pytest.mark.parametrize(
    ("words", "seeds"),
    [("fmod is decomposed as remainder", "380:600"), ("writes to views do not reach their bases", "0:500")],
)
def test_a_planted_fault_is_found(words, seeds):
    command = [sys.executable, "-m", "tests.fuzz", "--planted", words, "--seeds", seeds, "--seconds", "200"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout and "1 of 1 planted faults found" in done.stdout
