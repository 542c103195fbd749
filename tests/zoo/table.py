"""`python -m tests.zoo.table`: the results of the last runs of the zoo as a page.

Invariant: every case that was run has its line, and every failure its cause.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / ".pytest_cache" / "zoo"
_HEAD = """# The zoo of models

`make zoo` trains every model for three steps of AdamW on the lazy device and compares losses, parameters and buffers
with eager on the CPU: from one seed, with every dropout 0, each model in a process of its own. "lazy" is the default
way (operator by operator at first, programs swapped in when they are there), "compiled" has every cut compiled at
first sight and may not fall back. Equal means within 2e-4 + 2e-3 of the value, or as close to a training in float64
as eager is. "step" is the whole training step, eight times, under `torchlazy.compile`; "module" is the model alone under
it, six training steps with loss and optimizer outside and then, in eval mode, the losses of the same batches. Both have
every cut compiled at first sight. `tests/zoo/` has the models: `hf_` are tiny configurations of the transformers
library's. A row keeps its last result until it is run again, so that rows may be of several commits.

{summary}

The cuts are those of the last step; the one at the optimizer's step is wanted. Seconds are those of three steps, in
"compiled" with the compiler's (on a disk cache as it happened to be).

| model | lazy | largest difference | compiled | largest difference | cuts of a step | extern operators | seconds lazy, compiled |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""  # noqa: E501
_COMPILE_HEAD = """
## Under torchlazy.compile

Calls: captured / replayed (of these, audited: their Python ran as well and was compared) / left to their Python. A
step's first call makes the optimizer's state and is left to its Python; the second is captured.

| model | step | largest difference | calls | module | largest difference | calls | why Python ran |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_STEADY_HEAD = """
## Steady loops

`make zoo ZOO_ARGS=--steady` trains each model in loops that read their loss with `.item()`: seven steps, then six that
are watched, with new data of one size ("after": the loss is read after the step; "between": before its backward, where
the loop stops if it is not finite); and five rounds of three batch sizes, then two that are watched, read "between".
In a steady loop the watched steps bring no new trace, no compilation, no capture or variant of a compiled call, no
alarm, no call that runs its Python. Unless the run says `--compiles`, programs are not compiled, and a trace that a
program for all sizes would serve counts as a new one. "lazy" is the lazy device, "step" and "module" are as above.
Models that have not been run so are not counted.

{summary}

| model | way | commit | what moves in the watched steps | why |
| --- | --- | --- | --- | --- |
"""
_AT_ONCE_HEAD = """
Operators that run at once at each step of the lazy loops, which is steady too:

"""
_FORMS = ("step", "module")
_GPU_HEAD = """
## On a GPU

`make zoo ZOO_ARGS="--target cuda"`: eager on the GPU against programs there, without TF32; "graphs" is "step" with
`mode="reduce-overhead"`.

"""
_GPU_MODES = ("lazy", "compiled", *_FORMS, "graphs")


def page() -> str:
    """The page of the results that lie in `RESULTS`, models by name."""
    names = sorted({json.loads(path.read_text())["case"] for path in RESULTS.glob("*.json")})
    results = {mode: {name: _result(mode, name) for name in names} for mode in ("lazy", "compiled", *_FORMS)}
    rows, failures, calls = [], [], []
    for name in names:
        lazy, compiled = results["lazy"][name], results["compiled"][name]
        failures += [_failure(r[name]) for r in results.values() if r[name] and r[name]["outcome"] != "equal"]
        if lazy or compiled:
            rows.append(_row(name, lazy, compiled))
        if any(results[form][name] for form in _FORMS):
            calls.append(_calls_row(name, [results[form][name] for form in _FORMS]))
    text = _HEAD.format(summary="\n".join(_summary(mode, list(found.values())) for mode, found in results.items()))
    text += "".join(rows) + _COMPILE_HEAD + "".join(calls)
    text += _steady(names)
    on_gpu = {mode: {name: _result(f"cuda-{mode}", name) for name in names} for mode in _GPU_MODES}
    text += _GPU_HEAD + "".join(f"{_summary(mode, list(found.values()))}\n" for mode, found in on_gpu.items())
    wrong = [r for found in on_gpu.values() for r in found.values() if r and r["outcome"] != "equal"]
    text += "\n" * bool(wrong) + "".join(map(_failure, wrong))
    text += "\n## Not equal\n\n" + ("".join(failures) or "None.\n")
    text += "\n## Operators that ran apart from programs\n\n" + _fallbacks([*results["lazy"].values()])
    return text


def _steady(names: list[str]) -> str:
    """The section on steady loops: how many are, and each one that is not with its reasons."""
    ways = {way: {name: _result(f"steady-{way}", name) for name in names} for way in ("lazy", *_FORMS)}
    summary, rows = [], []
    for way, found in ways.items():
        run = {name: result for name, result in found.items() if result}
        steady = sum(result["outcome"] == "steady" for result in run.values())
        of = _builds(list(run.values()))
        summary.append(
            f"- {way}: {steady} of {len(run)} models run steadily in all loops" + (f" ({of})." if of else ".")
        )
        rows += [_steady_row(name, way, result) for name, result in run.items() if result["outcome"] != "steady"]
    at_once: dict[str, list[str]] = {}
    for name, result in ways["lazy"].items():
        for reason in result.get("loops", {}).get("after", {}).get("at once", {}):
            at_once.setdefault(reason, []).append(name)
    lines = [f"- {reason} ({', '.join(models)})\n" for reason, models in at_once.items()]
    head = _STEADY_HEAD.format(summary="\n".join(summary))
    return head + ("".join(rows) or "| (none) | | | | |\n") + _AT_ONCE_HEAD + ("".join(lines) or "None.\n")


def _steady_row(name: str, way: str, result: dict[str, Any]) -> str:
    moved, reasons = [], dict[str, None]()
    for loop, found in result.get("loops", {}).items():
        if found["moved"]:
            counts = ", ".join(f"{what} {times}" for what, times in found["moved"].items())
            moved.append(f"{loop}: {counts}")
            reasons |= dict.fromkeys(found["reasons"])
    why = list(reasons)[:2] or [result.get("error", "")]
    cells = [name, way, result.get("commit", ""), "; ".join(moved) or result["outcome"], "; ".join(why)[:400]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _result(mode: str, name: str) -> dict[str, Any]:
    path = RESULTS / f"{mode}-{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _summary(mode: str, found: list[dict[str, Any]]) -> str:
    run = [result for result in found if result]
    return f"- {mode}: {sum(r['outcome'] == 'equal' for r in run)} of {len(run)} models are equal ({_builds(run)})."


def _builds(found: list[dict[str, Any]]) -> str:
    """Which commits and torches the results are of: "abc1234 with torch 2.13.0, 3 models"."""
    told = Counter((r.get("commit") or "earlier", r.get("torch", "")) for r in found if r)
    return "; ".join(f"{commit} with torch {build or '?'}, {n} models" for (commit, build), n in told.most_common())


def _row(name: str, lazy: dict[str, Any], compiled: dict[str, Any]) -> str:
    either = lazy if "cuts" in lazy else compiled
    cuts = ", ".join(f"{cause} {count}" for cause, count in either.get("cuts", {}).items())
    externs = ", ".join(
        f"{op.removeprefix('aten.').removesuffix('.default')} {count}"
        for op, count in _top(compiled.get("externs", {}))
    )
    cells = [name, *_cells(lazy), *_cells(compiled), cuts, externs, f"{_seconds(lazy)}, {_seconds(compiled)}"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _calls_row(name: str, found: list[dict[str, Any]]) -> str:
    cells = [name]
    reasons: dict[str, None] = {}
    for result in found:
        counts: Counter[str] = Counter()
        for report in result.get("calls", {}).values():
            counts.update({key: report[key] for key in ("captures", "replays", "audits", "verified")})
            reasons |= dict.fromkeys(r for r in report["reasons"] if r.startswith("not ") and "new state" not in r)
        served = counts["replays"] + counts["audits"]
        cells += [*_cells(result), f"{counts['captures']} / {served} ({counts['audits']}) / {counts['verified']}"]
    cells.append("; ".join(reason.removeprefix("not replayed: ").partition(" (")[0] for reason in list(reasons)[:2]))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _cells(result: dict[str, Any]) -> tuple[str, str]:
    if not result:
        return "-", "-"
    return result["outcome"], f"{result['largest']:.1e}" if "largest" in result else "-"


def _top(externs: dict[str, int]) -> list[tuple[str, int]]:
    return list(externs.items())[:6]


def _seconds(result: dict[str, Any]) -> str:
    return f"{result['seconds']:.1f}" if "seconds" in result else "-"


def _failure(result: dict[str, Any]) -> str:
    cause = result.get("error") or f"{result['where']} differs by {result['largest']:.1e}; losses {result['losses']}"
    return f"- {result['mode']} `{result['case']}` {result['outcome']}: {cause}\n"


def _fallbacks(found: list[dict[str, Any]]) -> str:
    counted: Counter[str] = Counter()
    for result in found:
        counted.update(set(result.get("fallbacks", {})))
    lines = [f"- {reason} ({count} models)\n" for reason, count in counted.most_common()]
    return "".join(lines) or "None.\n"


if __name__ == "__main__":
    print(page(), end="")
