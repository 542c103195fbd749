"""`python -m tests.opinfo.table`: the results of the last runs of the operator database as a page.

Invariant: every failure of every result is in the page, with its cause, or under the known exceptions.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.opinfo.exceptions import EAGERS_STRIDED_OUT, KNOWN, is_known
from tests.opinfo.precision import LEFT_OUT
from tests.opinfo.readings import READINGS
from tests.opinfo.run import RESULTS, Build, builds_of, results_of

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "bool", "complex64")
_HEAD = """# The operator database

`make opinfo` runs torch's own operator database (`op_db`) on the lazy device and compares every sample with eager on
the CPU ((h) and (i): on a GPU): dtype, shape, strides and values. The readings are

{readings}

Each row tells which commit was run, and with which torch: each has a database of its own. Operators that failed were
mended and ran again: they are in the row of a later commit, the failure in that of the earlier one.
"Of each" is how many samples of an operator were asked for, "3 to all" where operators differ in that.
Max pooling has up to 1,440 samples, each of another geometry and so a kernel of its own: rows with fewer take 12 or 24.
All samples of an operator are recorded into one program. Values pass within the tolerance that
`torch.testing.assert_close` has for the dtype, or where they are at most three times as far from the float64 result as
eager's own (another order of summation); how many samples needed the latter is told. In reading (d) each sample has
several forms, which are counted. In (e) an error must have eager's type, a message as clear, and come at the call;
errors that lie in the values (counted as late, and listed below) come at the cut, as on other devices.

| reading | dtype | commit | torch | of each | operators | pass | known | fail | samples | by float64 | late |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def _about() -> list[tuple[str, str]]:
    return [(letter, reading.about) for letter, reading in READINGS.items()]


def page() -> str:
    """The page: a row for each reading, dtype and build, then exceptions and failures."""
    lines = [_HEAD.format(readings="\n".join(f"- ({letter}) {text}" for letter, text in _about()))]
    failures: list[str] = []
    for reading in READINGS:
        for dtype in DTYPES:
            path = RESULTS / f"{reading}-{dtype}.jsonl"
            lines += [_row(reading, dtype, build, results_of(path, build)) for build in builds_of(path)]
            failures += _failures(results_of(path))
    lines += ["\n## Known exceptions\n\n"]
    lines += [f"- `{k.op}` ({k.readings}; {', '.join(k.kinds)}): {k.cause}. Upstream: {k.upstream}.\n" for k in KNOWN]
    lines += ["\n## Where eager is no reference\n\n"]
    lines += [
        f"- `{name}` with an `out=` that is not row-major: {what}.\n" for name, what in EAGERS_STRIDED_OUT.items()
    ]
    lines += [f"- `{name}` in chains (p): {what}.\n" for name, what in LEFT_OUT.items()]
    lines += [_LANES]
    lines += _late()
    lines += _forms()
    lines += ["\n## Failures\n\n", *(failures or ["None.\n"])]
    return "".join(lines)


_LANES = """\
- Which of two tied zeros a maximum or minimum of tensors, `amax` or `amin` gives depends on eager's vector lanes: the
  last elements of 67 numbers differ from the others. Either is taken as right; so are the lanes in which `fmod` and
  `remainder` of float64 answer NaN for quotients beyond 2**1000.
- `add` with `alpha`, `addcmul` in float32: eager does not round the product before it is added, ours does: where it
  overflows and the sum would not, ours is infinite. `index_add` rounds it in both.
- `std` and `var` of all elements: eager sums float32 in one and is infinite where the sum overflows; ours are finite.
"""


def _late() -> list[str]:
    """The errors of reading (e) that come with the values."""
    late = {op: r["late"] for op, r in results_of(RESULTS / "e-float32.jsonl").items() if r.get("late")}
    if not late:
        return []
    return [
        "\n## Errors that come late\n\n",
        "In eager each of these looks at the numbers of an index tensor, which on the lazy device do not exist before "
        "the cut:\nto raise at the call would be a cut at every such call. They come at the cut with eager's type "
        "and message.\nOn a GPU eager itself tells them later, and only as a failed assertion.\n\n",
        *(f"- `{op}`: {count}, a position out of range\n" for op, count in sorted(late.items())),
        "\nThe same holds of every other look at numbers: divisors of integers, probabilities, classes of a loss.\n\n"
        "What nobody holds at the cut is not computed, and a look at its numbers is not taken: `x[i]` with an `i` out "
        "of range,\nwhose result is dropped unread, raises in eager and not here. Keeping such reads alive for their "
        "check would keep their\noperands in memory and run, in every step, what the program says it does not want; "
        "the traces of training steps looked\nat (a transformer, a convolutional network) hold none, so that what "
        "would be found is a fault in dead code. Errors of\noperators that run at once (`multinomial`, "
        "`torch._assert_async`, `linalg.inv`, `bincount`) come at the call, used or not.\n",
    ]


def _forms() -> list[str]:
    """How many calls of each form passed in reading (d), float32."""
    counts: Counter[str] = Counter()
    for result in results_of(RESULTS / "d-float32.jsonl").values():
        for label, count in result.get("counts", {}).items():
            counts["alias" if "alias" in label else label] += count
    if not counts:
        return []
    rows = [f"| {label} | {count} |\n" for label, count in sorted(counts.items())]
    return ["\n## Forms, float32\n\n| form | calls equal to eager's |\n| --- | --- |\n", *rows]


def _row(reading: str, dtype: str, build: Build, results: dict[str, dict[str, Any]]) -> str:
    failing = known = 0
    for result in results.values():
        excused = [is_known(result, kind) for _, kind, _ in result["failures"]]
        failing += any(entry is None for entry in excused)
        known += bool(excused) and all(excused)
    samples = sum(result["passed"] for result in results.values())
    by_exact = sum(result.get("by_exact", 0) for result in results.values())
    passing = len(results) - failing - known
    limits = {result["limit"] for result in results.values() if "limit" in result}
    asked = [str(limit) for limit in sorted(limits - {0})] + ["all"] * (0 in limits)
    each = "all" if reading == "e" else " to ".join(dict.fromkeys((asked[0], asked[-1]))) if asked else "few"
    late = sum(result.get("late", 0) for result in results.values())
    return (
        f"| {reading} | {dtype} | {build.commit or 'earlier'} | {build.torch} | {each} | {len(results)} | {passing} "
        f"| {known} | {failing} | {samples} | {by_exact} | {late} |\n"
    )


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
    print(page(), end="")
