"""`torchlazy.dump(folder)`: every cut inside the block as a numbered folder of readable files.

Invariant: a dump changes nothing of what is computed; it only keeps the user's line of each operator while its block is
open.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.device.mode import recorded_in_python
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.lazy.trace.trace import format_trace

if TYPE_CHECKING:
    from torchlazy.lazy.deferred import DeferredDriver
    from torchlazy.lazy.run.driver import CutEvent
    from torchlazy.prims.builder import Fallback

dump_files: Any = DeferredModule("torchlazy.lazy.inspect.dump_files")


class dump:
    """Write one folder for every cut inside the block.

    Args:
        folder: made if it does not exist; folders inside are numbered from 1 in the order of the cuts.
        stages: which forms to write (see `torchlazy.lazy.inspect.dump_files.STAGES`); None writes all.

    Raises:
        TypeError: no path, or stages that are no texts.
        ValueError: an unknown stage, or an empty path.
        OSError: when the block is entered, if the folder cannot be made.
    """

    recorder: Recorder  # set by the package at start
    driver: DeferredDriver

    def __init__(self, folder: str | os.PathLike[str], stages: Iterable[str] | None = None) -> None:
        self.folder = checked_folder("dump", folder)
        if stages is not None and not isinstance(stages, Iterable):
            raise TypeError(f'dump: stages is {stages!r}; give their names: stages=("prims", "kernels")')
        self.stages = dump_files.check_stages(stages)
        self.written: list[Path] = []

    def __enter__(self) -> dump:
        self.folder.mkdir(parents=True, exist_ok=True)  # first: if this fails, the block is not entered
        self.recorder.cut("dump window opens")
        self._kept_frames = self.recorder.keep_frames
        self.recorder.keep_frames = True
        self.driver.listeners.append(self._write)
        self._block = recorded_in_python()
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._write not in self.driver.listeners:
            raise RuntimeError("dump: this block is not open; write `with torchlazy.dump(folder):`")
        try:
            self._block.__exit__(kind, error, trace)
            self.recorder.cut("dump window closes")
        finally:
            self.recorder.keep_frames = self._kept_frames
            self.driver.listeners.remove(self._write)

    def _write(self, event: CutEvent) -> None:
        number = len(self.written) + 1
        self.written.append(dump_files.write_cut_folder(self.folder, number, record_of(event), self.stages))


def checked_folder(who: str, folder: object) -> Path:
    """The folder that a user named, as a path."""
    if not isinstance(folder, (str, bytes, os.PathLike)):
        raise TypeError(f'{who}: the folder is {folder!r}; give a path: torchlazy.{who}("out/")')
    name = os.fsdecode(folder)
    if not name:
        raise ValueError(f'{who}: the folder is an empty text; give a path, "." for the working folder')
    if Path(name).is_file():
        raise FileExistsError(f"{who}: {name!r} is a file; give a folder, which is made where there is none")
    return Path(name)


def record_of(event: CutEvent) -> Any:
    """The texts and graphs that a dump writes for a cut."""
    compiled = event.compiled
    notes = (f"outcome: {event.outcome}", f"operators: {len(event.trace.entries)}")
    if compiled is None:
        return dump_files.CutRecord(
            event.cause, event.frame, format_trace(event.trace), trace_to_graph(event.trace), notes=notes
        )
    texts = compiled.texts()
    sources = tuple(
        (f"kernel{position}", source.language, source.text) for position, source in enumerate(compiled.program.kernels)
    )
    # The graph is made again from this cut's own trace: it has the user's lines, which a cached program may lack.
    return dump_files.CutRecord(
        event.cause,
        event.frame,
        format_trace(event.trace),
        trace_to_graph(event.trace),
        compiled.prims,
        texts["loop_ir"],
        texts["fusion"],
        (*sources, ("run", "numba", compiled.run.source)),
        texts["program"],
        texts["memory"],
        compiled.timings,
        (*notes, *extern_lines(compiled.fallbacks)),
    )


def extern_lines(fallbacks: Iterable[Fallback]) -> tuple[str, ...]:
    """One line for each operator that stayed extern and why: "extern: 16 x aten.addmm.default: a contraction: ..."."""
    counts = Counter((fallback.op, fallback.reason) for fallback in fallbacks)
    return tuple(f"extern: {count} x {op}: {reason}" for (op, reason), count in counts.items())
