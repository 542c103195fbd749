"""docs/zoo.md from the results of the last runs of the zoo.

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
as eager is. `tests/zoo/` has the models: `hf_` are tiny configurations of the transformers library's.

{summary}

The cuts are those of the last step; the one at the optimizer's step is wanted. Seconds are those of three steps, in
"compiled" with the compiler's (on a disk cache as it happened to be).

| model | lazy | largest difference | compiled | largest difference | cuts of a step | extern operators | seconds lazy, compiled |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""  # noqa: E501


def write_table(page: Path, names: list[str]) -> None:
    """Write the page; models are in the order of `names`."""
    results = {mode: {name: _result(mode, name) for name in names} for mode in ("lazy", "compiled")}
    rows, failures = [], []
    for name in names:
        lazy, compiled = results["lazy"][name], results["compiled"][name]
        if not lazy and not compiled:
            continue
        rows.append(_row(name, lazy, compiled))
        failures += [_failure(found) for found in (lazy, compiled) if found and found["outcome"] != "equal"]
    text = _HEAD.format(summary="\n".join(_summary(mode, list(found.values())) for mode, found in results.items()))
    text += "".join(rows) + "\n## Not equal\n\n" + ("".join(failures) or "None.\n")
    text += "\n## Operators that ran apart from programs\n\n" + _fallbacks([*results["lazy"].values()])
    page.write_text(text)


def _result(mode: str, name: str) -> dict[str, Any]:
    path = RESULTS / f"{mode}-{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _summary(mode: str, found: list[dict[str, Any]]) -> str:
    run = [result for result in found if result]
    return f"- {mode}: {sum(r['outcome'] == 'equal' for r in run)} of {len(run)} models are equal."


def _row(name: str, lazy: dict[str, Any], compiled: dict[str, Any]) -> str:
    either = lazy if "cuts" in lazy else compiled
    cuts = ", ".join(f"{cause} {count}" for cause, count in either.get("cuts", {}).items())
    externs = ", ".join(
        f"{op.removeprefix('aten.').removesuffix('.default')} {count}"
        for op, count in _top(compiled.get("externs", {}))
    )
    cells = [name, *_cells(lazy), *_cells(compiled), cuts, externs, f"{_seconds(lazy)}, {_seconds(compiled)}"]
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
