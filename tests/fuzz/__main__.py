"""The command line: `python -m tests.fuzz --seeds 0:1000 --ways device,mode,compile,module --shrink --write --jobs 2`.

Invariant: the exit status is 0 only if nothing differs but what is known to.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import planted_calls, planted_programs
from tests.fuzz.planted import are_enough, search
from tests.fuzz.seeds import run_seeds
from tests.fuzz.ways import MORE_WAYS, WAYS

_FOUND = Path(__file__).parent / "found"
_TEST = '''"""Found by tests.fuzz, seed {seed}: {text}"""

from __future__ import annotations

from tests.fuzz.ways import check

PROGRAM = """
{program}"""


def test_seed_{seed}():
    check(PROGRAM, {ways!r})
'''


def _write(seed: int, one: dict[str, Any]) -> None:
    _FOUND.mkdir(exist_ok=True)
    text = one["text"].replace("\\", "\\\\").replace('"""', "'''")[:200]
    program = one["program"].replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    name = _FOUND / f"test_seed_{seed}.py"
    name.write_text(_TEST.format(seed=seed, text=text, program=program, ways=tuple(one["way"].split(","))))


def _plant(words: str, first: int, last: int, seconds: float) -> int:
    """The table of planted faults; the exit status says whether too few were found."""
    faults = (planted_calls.FAULTS | planted_programs.FAULTS).values()
    chosen = [fault for fault in faults if words in f"{fault.room}: {fault.name}"]
    begun = time.monotonic()
    found = search(chosen, first, last, seconds, lambda one: print(one.row(), flush=True))
    for one in found:
        if not one.found:
            print(one.row())
    there = sum(bool(one.found) for one in found)
    wrong = sorted({seed for one in found for seed in one.wrong})
    print(f"{there} of {len(found)} planted faults found, in {time.monotonic() - begun:.0f} s")
    print(f"seeds that are wrong without a fault: {wrong}")
    return 0 if found and are_enough(found) else 1


def main() -> int:
    """The exit status says whether a program differed that is not known to."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", help="from:to (0:1000, with --planted 0:2000)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join((*WAYS, *MORE_WAYS))}")
    parser.add_argument("--shrink", action="store_true", help="print programs as small as they fail")
    parser.add_argument("--write", action="store_true", help=f"save them as tests under {_FOUND}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--planted", nargs="?", const="", metavar="WORDS",
        help="plant faults (those whose names have these words) one by one, and say which program finds each",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all planted faults together")
    options = parser.parse_args()
    seeds = options.seeds or ("0:1000" if options.planted is None else "0:2000")
    first, last = map(int, seeds.split(":"))
    if options.planted is not None:
        return _plant(options.planted, first, last, options.seconds)
    ways = tuple(options.ways.split(","))
    if wrong := {*ways} - {*WAYS, *MORE_WAYS}:
        parser.error(f"no such way: {', '.join(sorted(wrong))}")
    counts: Counter[str] = Counter()

    def tell(seed: int, one: dict[str, Any]) -> None:
        counts[f"known: {one['known']}" if one.get("known") else f"{one['kind']} ({one['way']})"] += 1
        if not one.get("known"):
            print(f"--- seed {seed}, {one['way']}: {one['text']}\n{one['program']}\n", flush=True)
            if options.write:
                _write(seed, one)

    begun = time.monotonic()
    result = run_seeds(first, last, ways, options.jobs, options.shrink, tell=tell)
    for name, count in counts.most_common():
        print(f"{count:6} {name}")
    print(f"{result.ran} programs in {time.monotonic() - begun:.0f} s, {len(result.news())} finds that are not known")
    return 1 if result.news() else 0


if __name__ == "__main__":
    sys.exit(main())
