"""What a planted fault is, and how the fuzzer is tested by them: each is planted by itself, until a program finds it.

`python -m tests.fuzz --planted` prints the table. The faults: planted_calls.py, planted_programs.py.

Invariant: each program runs with each fault in a process of its own, and a find counts only where the same program is
right without the fault.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torchlazy.runtime.native import identity_check, recorder_library

from tests.fuzz.generate import draw_program
from tests.fuzz.program import Program
from tests.fuzz.ways import OutOfTime, failures, time_limit

_SECONDS = 60.0  # for a program
_COMPILED_CALLS = 2  # a program that is compiled makes so many


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong in which room, and the ways that run it; `compiled`: only programs that are compiled show it.

    `needs` is searched in a program's text: where it is missing, the fault cannot show, and the program is not run.
    """

    name: str
    room: str
    ways: tuple[str, ...]
    compiled: bool
    needs: str
    plant: Callable[[], None]


@dataclass(slots=True)
class Search:
    """How many programs were drawn, how it was found ("": not), and seeds that are wrong without it."""

    fault: Fault
    ran: int = 0
    found: str = ""
    wrong: list[int] = field(default_factory=list)

    def row(self) -> str:
        """A row of the table."""
        return f"{self.fault.room}: {self.fault.name:65} {self.ran:5}  {self.found or 'not found'}"


class Faults(dict[str, Fault]):
    """Faults by name. Calling it gives a decorator that adds what plants one; its name is the fault's."""

    def __call__(
        self, room: str, ways: tuple[str, ...], needs: str = "", compiled: bool = False
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def add(plant: Callable[[], None]) -> Callable[[], None]:
            name = plant.__name__.replace("_", " ")
            self[name] = Fault(name, room, ways, compiled, needs, plant)
            return plant

        return add


def instead(owner: Any, name: Any) -> Callable[[Callable[..., Any]], None]:
    """The decorated function takes the place of the one of this name, which it gets as its first argument."""
    old = owner[name] if isinstance(owner, dict) else getattr(owner, name)

    def put(new: Callable[..., Any]) -> None:
        @functools.wraps(old)
        def planted(*args: Any, **kwargs: Any) -> Any:
            return new(old, *args, **kwargs)

        if isinstance(owner, dict):
            owner[name] = planted
        else:
            setattr(owner, name, planted)

    return put


def search(
    faults: Iterable[Fault], first: int, last: int, seconds: float, tell: Callable[[Search], None]
) -> list[Search]:
    """Run programs with each fault until one finds it, for so many seconds at most."""
    result, end = [Search(fault) for fault in faults], time.monotonic() + seconds
    _prepare()
    for seed in range(first, last):
        left = [one for one in result if not one.found]
        if not left or time.monotonic() > end:
            break
        try:
            with time_limit(_SECONDS):
                program = draw_program(seed)
        except OutOfTime:
            continue
        text = program.text()
        for one in left:
            one.ran += 1
            if re.search(one.fault.needs, text) is None:
                continue
            found = _apart(program, one.fault, is_planted=True)
            if not found:
                continue
            if _apart(program, one.fault, is_planted=False):
                one.wrong.append(seed)
            else:
                one.found = found
                tell(one)
    return result


def _prepare() -> None:
    """What each process is to find ready: a program that is right has run each way."""
    torch.set_num_threads(1)
    for code in (identity_check.CODE, recorder_library.LIBRARY):
        code.wait()
    program = draw_program(0)
    program = replace(program, calls=program.calls[:_COMPILED_CALLS])
    for tier0 in (True, False):
        failures(program, ("mode", "compile", "native")[: 2 + tier0], tier0)
    gc.collect()
    gc.freeze()


def _apart(program: Program, fault: Fault, is_planted: bool) -> str:
    """How the program differs from eager in a new process: way, call and kind; empty where it does not."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        status = 1
        try:
            if is_planted:
                fault.plant()
            os.write(writing, json.dumps(_differences(program, fault)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return f"any, process ended with {status}" if status else str(json.loads(text))


def _differences(program: Program, fault: Fault) -> str:
    if fault.compiled:
        program = replace(program, calls=program.calls[:_COMPILED_CALLS])
    try:
        with time_limit(_SECONDS):
            found = failures(program, fault.ways, tier0=not fault.compiled)
    except OutOfTime:
        return ""
    return f"{found[0].way}, call {found[0].call}: {found[0].signature()}" if found else ""


def are_enough(searches: list[Search]) -> bool:
    """Whether 29 of 30 were found."""
    return 30 * sum(bool(one.found) for one in searches) >= 29 * len(searches)
