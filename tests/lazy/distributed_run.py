"""Processes that run programs together, eagerly and in each form of ours, one program after the other.

One set of processes runs all cases: starting one costs more than most cases do. Each says what was wrong with a form of
a case as soon as it has it, and none begins the next form before the others came to the end of this one. A case that
takes too long, or that not all come to the end of, ends the set; the next set goes on behind it.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.run.programs import KnownTrace

from tests.lazy import distributed_cases as cases

FORMS = ("mode", "compile", "device", "device compiled")
_GRACE = 60.0  # seconds that the others have where one of a set failed

MODULES = ("tests.lazy.distributed_sharded", cases.__name__)  # the last case ends a process
_READ: dict[Path, tuple[int, dict[str, str | None]]] = {}  # what was read so far of what is looked at again and again
Told = list[dict[str, str]]
"""For each process: {case / form: what was wrong, "" for nothing}."""


def run_world(
    world: int, folder: Path, target: str = "cpu", each: float = 180, total: float = 1500, of: tuple[str, ...] = MODULES
) -> Told:
    """Run the cases that the module `of` has for a world of that size; `each` and `total` are seconds."""
    end = time.monotonic() + total
    told: Told = [{} for _ in range(world)]
    done: list[str] = []
    keys = {f"{name} / {form}" for name in cases_of(world, of) for form in FORMS}
    while time.monotonic() < end and not keys <= set(done):
        here = folder / f"world{world}_after_{len(done)}"
        here.mkdir()
        why = _run_set(world, here, target, of, done, each, end)
        for rank, one in enumerate(told):
            one.update(_finished(here, rank))
        begun = [key for rank in range(world) for key, _ in _lines(here, rank)]
        unfit = [key for key in keys if any(one.get(_eager_of(key)) for one in told)]  # these forms never begin
        done += [key for key in dict.fromkeys((*begun, *unfit)) if key not in done]
        if not why:
            break
        for rank, one in enumerate(told):
            for key in begun[-1:]:
                one.setdefault(key, f"process {rank}: {why}\n{_text(here / f'stack{rank}')}")
        if not begun:
            return [{"": f"{why}\n{_text(here / f'error{rank}')}"} for rank in range(world)]
    return told


def cases_of(world: int, of: tuple[str, ...] = MODULES) -> dict[str, Callable[[str, int], Any]]:
    """The cases of these modules for a world of that size, by name."""
    return {name: case for module in of for name, case in importlib.import_module(module).cases_of(world).items()}


def _eager_of(key: str) -> str:
    return key.rpartition(" / ")[0] + " / eager"


def wrong(told: Told, key: str) -> str:
    """What the processes said was wrong with a form of a case."""
    eager = _eager_of(key)
    missing = [one.get("") or one.get(eager) or "never came to it" for one in told]
    texts = [one.get(key, instead) for one, instead in zip(told, missing, strict=True)]
    return "\n".join(dict.fromkeys(text for text in texts if text))


def _run_set(world: int, here: Path, target: str, of: tuple[str, ...], done: list[str], each: float, end: float) -> str:
    """Why the set was ended, "" where it came to its end."""
    spawn = multiprocessing.get_context("spawn")
    given = [(rank, world, str(here), target, of, tuple(done), each) for rank in range(world)]
    children = [spawn.Process(target=_child, args=args) for args in given]
    for child in children:
        child.start()
    try:
        return _watch(children, here, each, end)
    finally:
        for child in children:
            child.kill()
            child.join()


def _watch(children: list[Any], here: Path, each: float, end: float) -> str:
    seen, since, failed = "", time.monotonic(), 0.0
    while any(child.is_alive() for child in children):
        time.sleep(0.05)
        now = time.monotonic()
        if now > end:
            return "the time of all cases was over"
        lines = [_lines(here, rank) for rank in range(len(children))]
        if (state := repr(lines)) != seen:
            seen, since = state, now
        if now - since > each + (60 if not any(lines) else 2):  # processes start: they import, and meet
            return f"took longer than {each:.0f} s"
        ended = not all(child.is_alive() for child in children)
        last = [list(one[-1]) if one else ["", None] for one in lines]
        alone = any(told for _, told in last) and any(told is None for _, told in last)
        failed = (failed or now) if ended or alone else 0.0
        if failed and now - failed > min(_GRACE, each / 2):
            break
    dead = {rank: child.exitcode for rank, child in enumerate(children) if child.exitcode}
    return f"{dead} died" if dead else "one process failed or ended, and another waited for it" if failed else ""


def _lines(here: Path, rank: int) -> list[tuple[str, str | None]]:
    """(case / form, what was wrong) for each finished form, and None for the one that it is in."""
    path = here / f"told{rank}"
    size = path.stat().st_size if path.exists() else 0
    before, found = _READ.get(path, (0, {}))
    if size > before:
        with path.open("rb") as file:
            file.seek(before)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        found |= dict(map(json.loads, whole.splitlines()))
        _READ[path] = before + len(whole), found
    return list(found.items())


def _finished(here: Path, rank: int) -> dict[str, str]:
    return {key: told for key, told in _lines(here, rank) if told is not None}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _child(
    rank: int, world: int, folder: str, target: str, of: tuple[str, ...], done: tuple[str, ...], each: float
) -> None:
    here = Path(folder)
    try:
        _run_cases(rank, world, here, target, of, done, each)
    except BaseException as error:
        (here / f"error{rank}").write_text("".join(traceback.format_exception(error)))
        os._exit(1)
    os._exit(0)  # without what torch does at its end: another may be gone


def _run_cases(
    rank: int, world: int, here: Path, target: str, of: tuple[str, ...], done: tuple[str, ...], each: float
) -> None:
    os.environ["TORCHLAZY_TIERS"] = "off"
    torchlazy.config.tiers = "off"
    torchlazy.config.rng = "eager"
    warnings.simplefilter("ignore")  # a compiled call that runs its Python says so
    torch.set_num_threads(1)
    gc.freeze()  # each capture looks for garbage: not in all that was imported
    if target == "cuda":
        index = rank % torch.cuda.device_count()
        if torch.cuda.device_count() < world:  # NCCL refuses two processes on one GPU of a host: these are of two
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        cases.set_plain(f"cuda:{index}")
        torch.cuda.set_device(index)
        torchlazy.set_target(f"cuda:{index}")
        torch.backends.cuda.matmul.allow_tf32 = False
    limit = datetime.timedelta(seconds=2 * each)  # what hangs is ended before, with its stack
    dist.init_process_group(
        "gloo" if target == "cpu" else "cpu:gloo,cuda:nccl", init_method=f"file://{here}/meet", rank=rank,
        world_size=world, timeout=limit,
    )  # fmt: skip
    compiled = driver.tiers.look_up
    compiled_at_once = {name for module in of for name in importlib.import_module(module).COMPILED}
    by_operator = lambda trace, device, frame: (KnownTrace(seen=1), "tier 0: first sight")  # noqa: E731
    with (here / f"told{rank}").open("w", buffering=1) as told, (here / f"stack{rank}").open("w") as stack:

        def attempt(key: str, function: Callable[[], Any]) -> tuple[Any, str]:
            told.write(json.dumps([key, None]) + "\n")
            faulthandler.dump_traceback_later(each, file=stack)
            found, text = None, ""
            try:
                found = function()
            except Exception as error:
                text = "".join(traceback.format_exception(error)[-6:])[-4000:]
            faulthandler.cancel_dump_traceback_later()
            told.write(json.dumps([key, text]) + "\n")
            if "CUDA error" in text:
                os._exit(1)  # no later case could run in this process
            while cases.GONE not in key and any(key not in _finished(here, other) for other in range(world)):
                time.sleep(0.002)  # the parent ends it
            return found, text

        for name, case in cases_of(world, of).items():
            forms = [form for form in FORMS if f"{name} / {form}" not in done]
            if not forms or (f"{name} / eager" in done and len(forms) == len(FORMS)):
                continue
            driver.tiers.look_up = compiled if name in compiled_at_once else by_operator  # type: ignore[method-assign]
            wanted, unfit = attempt(f"{name} / eager", lambda case=case: case("eager", rank))
            for form in () if unfit else forms:
                attempt(
                    f"{name} / {form}",
                    lambda case=case, form=form, wanted=wanted: torch.testing.assert_close(
                        case(form, rank), wanted, rtol=1e-5, atol=1e-5
                    ),
                )
