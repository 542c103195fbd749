"""Runs seeds in this process, and tells of each on standard output, a JSON object a line.

Invariant: `{"seed": n, "begins": true}` stands before whatever a seed does, so that a crash has its seed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch
from torchlazy.lazy.compiled import inline_cache
from torchlazy.runtime.native import identity_check, recorder_library

from tests.fuzz.generate import draw_program
from tests.fuzz.known import known
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.ways import Failure, OutOfTime, failures, time_limit

_SECONDS, _SHRINKING = 60.0, 300.0
_COMPILED = 25  # one program in so many goes through the compiler


def _tell(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _shrunk(program: Program, failure: Failure, tier0: bool) -> Program:
    def fails(candidate: Program) -> bool:
        try:
            with time_limit(_SECONDS):
                found = failures(candidate, (failure.way,), tier0)
        except Exception:  # eager fails otherwise
            return False
        return bool(found) and found[0].is_like(failure) and not known(candidate, found[0])

    try:
        with time_limit(_SHRINKING):
            return shrink(program, fails)
    except OutOfTime:
        return program


def run_seed(seed: int, ways: tuple[str, ...], shrinks: bool) -> list[dict[str, Any]]:
    """What is wrong with a seed: one object for each kind of difference."""
    tier0 = seed % _COMPILED != 0
    try:
        with time_limit(_SECONDS):
            program = draw_program(seed)
            if not tier0:
                program = replace(program, calls=program.calls[:5])
            found = failures(program, ways, tier0)
    except OutOfTime:
        return [{"way": "any", "kind": "time", "text": f"not done in {_SECONDS:.0f} s", "program": f"# seed {seed}"}]
    told: dict[str, dict[str, Any]] = {}
    for failure in found:
        reason = known(program, failure)
        if failure.signature() in told:
            told[failure.signature()]["way"] += f",{failure.way}"
            continue
        small = _shrunk(program, failure, tier0) if shrinks and not reason else program
        told[failure.signature()] = {
            "way": failure.way, "kind": failure.found.kind, "text": str(failure), "known": reason,
            "program": small.text(), "tier0": tier0,
        }  # fmt: skip
    return list(told.values())


def main(first: int, last: int, step: int, ways: tuple[str, ...], shrinks: bool) -> None:
    """The seeds from `first` to `last`, each `step`-th."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of torch's own C++
    identity_check.CODE.wait()  # what runs must not depend on when a compiler is done
    recorder_library.LIBRARY.wait()
    inline_cache._FIRST_PATIENCE = 1  # calls are few: the second replay is one in C++ where it may be
    torch.zeros(1).to("lazy").add(1).cpu()
    gc.freeze()
    for seed in range(first, last, step):
        _tell(seed=seed, begins=True)
        try:
            found = run_seed(seed, ways, shrinks)
        except Exception as error:
            found = [{"way": "any", "kind": "fuzzer", "text": repr(error), "known": "", "program": f"# seed {seed}"}]
        _tell(seed=seed, found=found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), tuple(sys.argv[4].split(",")), sys.argv[5] == "shrink")
