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


def main() -> int:
    """The exit status says whether a program differed that is not known to."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", default="0:1000", help="from:to")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join((*WAYS, *MORE_WAYS))}")
    parser.add_argument("--shrink", action="store_true", help="print programs as small as they fail")
    parser.add_argument("--write", action="store_true", help=f"save them as tests under {_FOUND}")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
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
