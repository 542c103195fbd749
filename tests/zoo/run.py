"""`python -m tests.zoo.run --mode lazy,module --cases unet,hf_bert`: trains the zoo. With
`--steady` it watches longer trainings instead: whether they become steady (tests/zoo/steady.py).

Invariant: each case trains in a process of its own with a time limit; one that crashes costs its own line only. What
was run before stays in .pytest_cache/zoo/; `python -m tests.zoo.table` prints it as a page.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torchlazy
from torchlazy.lazy.api import driver

from tests.zoo.case import Case
from tests.zoo.modules import MODULES
from tests.zoo.steady import measure_steadiness
from tests.zoo.table import RESULTS
from tests.zoo.training import causes, compare_trainings, train

ROOT = Path(__file__).parents[2]
MODES = ("lazy", "compiled", "step", "module")
GPU_MODES = (*MODES, "graphs")  # with --target cuda
STEADY = ("lazy", "step", "module")
_GOOD = ("equal", "steady")
_TORCH = torch.__version__.partition("+")[0]
FORMS = {"step": "step", "module": "module", "graphs": "graphs"}  # the others run as they are


def all_cases() -> dict[str, Case]:
    """Every case by name; those of the transformers library where it is installed."""
    try:
        import transformers
    except ImportError:
        return dict(MODULES)
    from tests.zoo.transformers_zoo import TRANSFORMERS

    transformers.logging.set_verbosity_error()
    return {**MODULES, **TRANSFORMERS}


def main() -> int:
    """Run what the command line asks for; the exit status says whether anything failed."""
    options = _options()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    cases = all_cases()
    names = options.cases.split(",") if options.cases else list(cases)
    if unknown := sorted(set(names) - cases.keys()):
        raise SystemExit(f"no such cases: {unknown}; there are {', '.join(cases)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    on_gpu = options.target == "cuda"
    default = STEADY if options.steady else GPU_MODES if on_gpu else MODES
    modes = options.mode.split(",") if options.mode else default
    for name, mode in [(name, mode) for mode in modes for name in names]:
        path = RESULTS / f"{'steady-' * options.steady}{'cuda-' * on_gpu}{mode}-{name}.json"
        if options.resume and path.exists():
            continue
        if options.redo_failures and path.exists() and json.loads(path.read_text())["outcome"] in _GOOD:
            continue
        work = functools.partial(measure, target=options.target)
        if options.steady:
            work = functools.partial(measure_steadiness, target=options.target, compiles=options.compiles)
        result = {**_isolated(work, cases[name], mode, options.timeout), "commit": _commit(), "torch": _TORCH}
        path.write_text(json.dumps(result))
        failed += result["outcome"] not in _GOOD
        print(_line(result), flush=True)
    return 1 if failed else 0


def _line(result: dict[str, Any]) -> str:
    shown = ("mode", "case", "outcome", "largest", "where", "cuts", "seconds", "error")
    moved = {name: loop["moved"] for name, loop in result.get("loops", {}).items() if loop["moved"]}
    return " ".join([*(str(result[name]) for name in shown if result.get(name)), *([str(moved)] if moved else [])])


def _commit() -> str:
    """The commit that the working tree is at, short; "" outside of a repository."""
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return os.environ.get("TORCHLAZY_COMMIT") or asked.stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mode",
        default="",
        help="lazy: default tiers; compiled: every cut, at first sight; step, module: under torchlazy.compile; "
        "graphs: step as CUDA graphs; default: all, or with --steady lazy, step and module",
    )
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda"), help="of the lazy device, and of eager")
    parser.add_argument("--steady", action="store_true", help="whether training loops become steady, instead")
    parser.add_argument("--compiles", action="store_true", help="with --steady: every cut compiled, not only counted")
    parser.add_argument("--cases", default="", help="names separated by commas; default: all")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one case")
    parser.add_argument("--redo-failures", action="store_true", help="only cases whose last result is a failure")
    parser.add_argument("--continue", dest="resume", action="store_true", help="leave out cases that have a result")
    return parser.parse_args()


def _isolated(work: Callable[[Case, str], dict[str, Any]], case: Case, mode: str, timeout: float) -> dict[str, Any]:
    """The result of a case in a forked process, which has everything imported and shares no state with its siblings."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(work, case, mode, sender))
    process.start()
    sender.close()
    facts = {"case": case.name, "mode": mode}
    try:
        if not receiver.poll(timeout):
            return {**facts, "outcome": "timeout", "error": f"no result after {timeout:.0f} s"}
        return {**facts, **receiver.recv()}
    except EOFError:
        process.join(10)
        return {**facts, "outcome": "crash", "error": f"the process died ({process.exitcode})"}
    finally:
        process.kill()
        process.join()
        receiver.close()


def _report(work: Callable[[Case, str], dict[str, Any]], case: Case, mode: str, sender: Connection) -> None:
    try:
        result = work(case, mode)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({place})"
        if os.environ.get("TORCHLAZY_ZOO_TRACEBACK"):
            traceback.print_exc()
        result = {"outcome": "error", "error": text}
    driver.tiers.pool.close()
    sender.send(result)


def measure(case: Case, mode: str, target: str = "cpu") -> dict[str, Any]:
    """Train eagerly on `target` and lazily in this process, and compare. The result is plain data."""
    if mode not in (GPU_MODES if target == "cuda" else MODES):
        raise ValueError(f"mode {mode!r}: there are {GPU_MODES}, graphs on a GPU alone")
    torchlazy.set_target(target)
    if target == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    torchlazy.config.tiers, torchlazy.config.strict = ("on", False) if mode == "lazy" else ("off", True)
    form = FORMS.get(mode, "plain")
    torchlazy.config.store = "off"  # what an earlier run compiled proves nothing
    # Eager encoders on the CPU have a way of their own for inference with padding, which gives other values at padded
    # places than the modules' code does; other devices have not.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return _measured(case, mode, form, target)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _measured(case: Case, mode: str, form: str, target: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        want = train(case, target, form=form)
        have = train(case, "lazy", form=form, compiled=True)
        verdict = compare_trainings(have, want, case, form)
    metrics = have.metrics
    externs = metrics["extern_calls"] if mode != "lazy" else {}
    return {
        "outcome": "equal" if verdict.equal else "different",
        "largest": verdict.largest,
        "where": verdict.where,
        "losses": [want.losses, have.losses],
        "cuts": causes(have.cuts),
        "frames": [f"{cause} at {frame}" for cause, frame in have.cuts],
        "fallbacks": metrics["fallbacks"],
        "externs": dict(sorted(externs.items(), key=lambda item: -item[1])),
        "kernels": metrics["kernels"],
        "seconds": round(have.seconds, 2),
        "calls": have.calls,
        "warnings": sorted({str(w.message)[:300] for w in told if "torchlazy" in str(w.message)}),
    }


if __name__ == "__main__":
    sys.exit(main())
