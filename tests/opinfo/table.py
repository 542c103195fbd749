"""`python -m tests.opinfo.table`: docs/opinfo.md from the results of the last runs.

Invariant: every failure of every result is in the page, with its cause, or under the known exceptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.opinfo.exceptions import KNOWN, is_known
from tests.opinfo.run import RESULTS, ROOT, results_of

PAGE = ROOT / "docs" / "opinfo.md"
READINGS = {
    "a": "the primitives' eager references, forward",
    "b": "the lazy device through the compiler, forward",
    "c": "the lazy device through the compiler, gradients",
}
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "bool", "complex64")
_HEAD = """# The operator database

`make opinfo` runs torch's own operator database (`op_db`) on the lazy device and compares every sample with eager on
the CPU: dtype, shape, strides and values. The readings are

{readings}

Where the compiled run of a reading was not made, the interpreter of loop IR stands in for the C++ compiler, and the row
says so. All samples of an operator are recorded into one program. Values pass within the tolerance that
`torch.testing.assert_close` has for the dtype, or where they are at most three times as far from the float64 result as
eager's own (another order of summation); how many samples needed the latter is told.

| reading | dtype | operators | pass | known | fail | samples | by float64 |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    """Write the page."""
    lines = [_HEAD.format(readings="\n".join(f"- ({letter}) {text}" for letter, text in READINGS.items()))]
    failures: list[str] = []
    for reading in READINGS:
        for dtype in DTYPES:
            for suffix, label in (("", reading), ("-loops", f"{reading}, loop IR interpreted")):
                results = results_of(RESULTS / f"{reading}-{dtype}{suffix}.jsonl")
                if results:
                    lines.append(_row(label, dtype, results))
                    failures += _failures(results)
                    break
    lines += ["\n## Known exceptions\n\n"]
    lines += [f"- `{k.op}` ({k.readings}; {', '.join(k.kinds)}): {k.cause}. Upstream: {k.upstream}.\n" for k in KNOWN]
    lines += ["\n## Failures\n\n", *(failures or ["None.\n"])]
    PAGE.write_text("".join(lines))
    print(f"{PAGE.relative_to(ROOT)}: {len(failures)} failures")


def _row(reading: str, dtype: str, results: dict[str, dict[str, Any]]) -> str:
    failing = known = 0
    for result in results.values():
        excused = [is_known(result, kind) for _, kind, _ in result["failures"]]
        failing += any(entry is None for entry in excused)
        known += bool(excused) and all(excused)
    samples = sum(result["passed"] for result in results.values())
    by_exact = sum(result.get("by_exact", 0) for result in results.values())
    passing = len(results) - failing - known
    return f"| {reading} | {dtype} | {len(results)} | {passing} | {known} | {failing} | {samples} | {by_exact} |\n"


def _failures(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for result in results.values():
        bad = [(number, kind, text) for number, kind, text in result["failures"] if is_known(result, kind) is None]
        if bad:
            number, kind, text = bad[0]
            text = text.replace(str(Path.home()), "~").replace("|", "\\|")[:300]
            lines.append(
                f"- {result['reading']} {result['dtype']} `{result['op']}` {kind} (#{number}, {len(bad)}): {text}\n"
            )
    return lines


if __name__ == "__main__":
    main()
