"""Statistics since the last reset: counts behind `torchlazy.metrics()`, lines and reasons behind `torchlazy.report()`.

Invariant: recording pays nothing for it. Counts are added up at cuts; a line is searched where a cut has found it
already, or at an operator's first run outside a program.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torchlazy.lazy.trace.diff import Divergence, summary
from torchlazy.lazy.trace.user_frames import text_of

_KEPT_DIVERGENCES = 200

T = TypeVar("T")


class Metrics:
    """Running counts since the last reset. `ops` is added up at each cut, so reading it costs the recorder nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.traces = 0
        self.ops = 0
        self.cuts: Counter[str] = Counter()
        self.reads_apart: Counter[str] = Counter()  # values read on the host without a cut
        self.hits = 0
        self.misses = 0
        self.compiles = 0
        self.compile_seconds = 0.0
        self.kernels = 0
        self.graph_replays = 0
        self.launched_ahead = 0  # stages of graphs, before the cut
        self.extern_calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.templates = 0  # programs for all sizes
        self.generalised = 0  # new traces that such a program served
        self.hot_sizes = 0  # programs for one size each, which such a program served most
        self.hot_sizes_dropped = 0  # of them, given up for others
        self.hot_seconds = 0.0  # spent on making them in the background
        self.not_generalised: Counter[str] = Counter()  # why traces that differ in numbers only have no such program
        self.bytes = 0
        self.failed_diagnostics: Counter[str] = Counter()  # texts and records about the program that could not be made

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, a copy: nested counters become dicts."""
        return {
            "traces": self.traces,
            "ops": self.ops,
            "cuts": dict(self.cuts),
            "reads_apart": dict(self.reads_apart),
            "hits": self.hits,
            "misses": self.misses,
            "compiles": self.compiles,
            "compile_seconds": self.compile_seconds,
            "kernels": self.kernels,
            "graph_replays": self.graph_replays,
            "launched_ahead": self.launched_ahead,
            "extern_calls": dict(self.extern_calls),
            "fallbacks": dict(self.fallbacks),
            "templates": self.templates,
            "generalised": self.generalised,
            "hot_sizes": self.hot_sizes,
            "hot_sizes_dropped": self.hot_sizes_dropped,
            "hot_seconds": self.hot_seconds,
            "not_generalised": dict(self.not_generalised),
            "bytes": self.bytes,
            "failed_diagnostics": dict(self.failed_diagnostics),
        }


@dataclass(frozen=True)
class CutLine:
    """How often one line caused a cut. `kind` is "sync" or "flush"."""

    cause: str
    kind: str
    frame: str
    count: int


@dataclass(frozen=True)
class ExternUse:
    """A library call inside programs: an ATen operator that is no generated kernel, and why.

    `by_choice` is False where a rule is missing or failed. `count` are calls in the programs that were compiled;
    `frame` is the user's line of the first, "" where lines were not kept.
    """

    op: str
    reason: str
    frame: str
    count: int
    by_choice: bool


@dataclass(frozen=True)
class EagerUse:
    """An operator that could not be recorded and ran at once, and why; `frame` is its line the first time."""

    op: str
    reason: str
    frame: str
    count: int


@dataclass(frozen=True)
class Report:
    """The statistics of the process since the start or `torchlazy.reset_metrics()`; print it, or use `to_dict()`.

    `counts` is `torchlazy.metrics()`. `divergences` are the last new traces, and where each differed from the known
    ones.
    """

    counts: dict[str, Any]
    cuts: tuple[CutLine, ...]
    divergences: tuple[Divergence, ...]
    externs: tuple[ExternUse, ...]
    eager: tuple[EagerUse, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, all the way down."""
        return {
            "counts": self.counts,
            "cuts": [asdict(line) for line in self.cuts],
            "divergences": [found.to_dict() for found in self.divergences],
            "externs": [asdict(use) for use in self.externs],
            "eager": [asdict(use) for use in self.eager],
        }

    def __str__(self) -> str:
        counts = self.counts
        lines = [
            f"torchlazy: {counts['traces']} cuts, {counts['ops']} operators recorded, {counts['hits']} hits, "
            f"{counts['misses']} misses, {counts['compiles']} programs compiled in {counts['compile_seconds']:.2f} s, "
            f"{counts['kernels']} kernels launched, {sum(counts['extern_calls'].values())} library calls, "
            f"{counts['bytes']} bytes allocated"
        ]
        lines += heading("cuts", (f"{c.count} x {c.cause} ({c.kind}) at {c.frame or '?'}" for c in self.cuts))
        lines += heading("new traces", divergence_lines(self.divergences))
        fixed = counts.get("not_generalised", {})
        if counts.get("hot_sizes"):
            lines.append(
                f"programs of their own for hot sizes: {counts['hot_sizes']} made in the background in "
                f"{counts['hot_seconds']:.2f} s, {counts['hot_sizes_dropped']} given up for others"
            )
        lines += heading("numbers that are no inputs", (f"{n} x {reason}" for reason, n in fixed.items()))
        lines += heading("library calls in programs", map(extern_line, self.externs))
        lines += heading("operators that ran at once", map(eager_line, self.eager))
        other = {reason: n for reason, n in counts["fallbacks"].items() if not _is_eager(reason, self.eager)}
        lines += heading("fallbacks", (f"{n} x {reason}" for reason, n in other.items()))
        return "\n".join(lines)


def heading(title: str, lines: Iterable[str]) -> list[str]:
    """The lines, indented, under a title; nothing where there are none."""
    found = [f"    {line}" for line in lines]
    return [f"{title}:", *found] if found else []


def divergence_lines(divergences: Iterable[Divergence]) -> list[str]:
    """One line for each kind of divergence, with its remedy."""
    return [
        (f"{count} x like: " if count > 1 else "") + str(found) + (f": {found.remedy}" if found.remedy else "")
        for count, found in summary(tuple(divergences))
    ]


def extern_line(use: ExternUse) -> str:
    """ "16 x aten.addmm.default at model.py:41: a contraction"."""
    missing = "" if use.by_choice else " [no rule of ours]"
    return f"{use.count} x {use.op} at {use.frame or '?'}: {use.reason}{missing}"


def eager_line(use: EagerUse) -> str:
    """ "3 x aten.nonzero.default at train.py:7: data-dependent shape"."""
    return f"{use.count} x {use.op} at {use.frame or '?'}: {use.reason}"


def _is_eager(reason: str, eager: Iterable[EagerUse]) -> bool:
    return any(reason == f"{use.op}: {use.reason}" for use in eager)


class Account:
    """The data that a `Report` is made of, while they are collected."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._cuts: Counter[tuple[str, str]] = Counter()
        self.cuts_at: dict[tuple[str, Any], int] = {}  # natively recorded ones, by places (`user_frames.user_place`)
        self.divergences: deque[Divergence] = deque(maxlen=_KEPT_DIVERGENCES)
        self.externs: Counter[tuple[str, str, str, bool]] = Counter()
        self.eager: Counter[tuple[str, str]] = Counter()
        self.eager_frames: dict[tuple[str, str], str] = {}

    @property
    def cuts(self) -> Counter[tuple[str, str]]:
        """How often each cause cut a trace at each of the user's lines."""
        at, self.cuts_at = self.cuts_at, {}
        for (cause, place), count in at.items():
            self._cuts[cause, text_of(place)] += count
        return self._cuts


metrics = Metrics()
account = Account()


def diagnosed(what: str, otherwise: T, make: Callable[..., T], *args: Any) -> T:
    """What a diagnostic says; `otherwise`, and a count, where it raises: the user's program goes on without it."""
    try:
        return make(*args)
    except Exception as error:
        metrics.failed_diagnostics[f"{what}: {type(error).__name__}"] += 1
        return otherwise
