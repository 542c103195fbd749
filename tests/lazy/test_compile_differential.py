"""Random programs compiled and plain: after every call, everything that can be seen is equal.

`python -m tests.lazy.test_compile_differential 0 1000` plays these seeds on both kinds of tensors, and prints the
program and the call of each difference.

Invariant: the plain program runs on ordinary CPU tensors in eager; where it draws random numbers, on the tensors that
the compiled one runs on.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torchlazy

from tests.lazy.compile_programs import Program, make_program
from tests.lazy.compile_world import Player, difference

QUICK = range(24)


def check(program: Program, device: str, audit: bool) -> tuple[str, Any]:
    """How the compiled program differs from the plain one (empty: not at all), and its report."""
    made: list[Any] = []
    rng = torchlazy.config.rng

    def compiled(function: Any) -> Any:
        made.append(torchlazy.compile(function, audit=audit))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Random bits and the lists of autocast are a device's own.
        own = program.draws or "autocast" in str(program)
        torchlazy.config.rng = "eager" if device == "cpu" else rng
        want = list(Player(program, device if own else "cpu", lambda function: function).play())
        torchlazy.sync()
        have = Player(program, device, compiled).play()
        for number, theirs in enumerate(want):
            told = difference(next(have), theirs)
            if told:
                torchlazy.config.rng = rng
                return f"call {number}: {told}", made[0].report()
    torchlazy.sync()
    torchlazy.config.rng = rng
    alarm = made[0].report().alarm
    return ("" if "captures served" in alarm else alarm and f"alarm: {alarm}"), made[0].report()


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize("audit", [False, True], ids=["unaudited", "audited"])
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_compiled_programs_do_what_plain_ones_do(device: str, audit: bool) -> None:
    replays = 0
    # Each program runs on both kinds of tensors, audited on one of them.
    for seed in QUICK[(device == "cpu") ^ audit :: 2]:
        program = make_program(seed)
        told, report = check(program, device, audit)
        assert not told, f"{told}\n{program}\n{report}"
        replays += report.replays + report.audits  # calls that a template serves
    assert replays > len(QUICK) // 2


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_what_replays_would_have_done(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is compared, none is replayed."""
    monkeypatch.setattr(torchlazy.config, "audit", "all")
    audits = 0
    for seed in range(24 + (device == "cpu"), 64, 2):
        program = make_program(seed)
        told, report = check(program, device, audit=True)
        assert not told, f"{told}\n{program}\n{report}"
        audits += report.audits
        assert not report.replays
    assert audits > 20


def main(first: int, last: int) -> int:
    """Play the seeds; the exit status says whether all were equal."""
    from torchlazy.lazy.api import driver
    from torchlazy.lazy.run.programs import KnownTrace

    torchlazy.config.store = "off"
    driver.tiers.look_up = lambda trace, device, frame: (KnownTrace(seen=1), "tier 0: first sight")  # type: ignore[method-assign]
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        program = make_program(seed)
        for device in ("lazy", "cpu"):
            audit = seed % 3 == 0
            try:
                told, report = check(program, device, audit)
                counts.update(captures=report.captures, replays=report.replays, verified=report.verified)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                told, report = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})", ""
            counts["played"] += 1
            if told:
                counts["different"] += 1
                print(f"--- {device}, audit {audit}: {told}\n{program}\n{report}\n", flush=True)
            driver.forget()
    print(dict(counts))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
