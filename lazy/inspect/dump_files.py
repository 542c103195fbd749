"""Writes one folder for each cut: every form of its trace, from operators to machine code, as readable files.

    0007_sync_item/
        00_cut.txt      cause, the user's frame, what came of it, durations
        01_trace.txt    the recorded operators
        02_aten.py      the graph in ATen operators
        03_prims.py     the same in primitives
        04_loop_ir.txt  loop nests before fusion
        05_fusion.txt   what was fused, what was not, and why
        06_kernels/     generated source, one file a kernel
        07_program.txt  launches and calls in order
        08_memory.txt   buffers, their lives, their bytes
        graph.dot       the graph as a picture, in the language of Graphviz

Invariant: this module only writes what it is handed. A part that a cut does not have (a cache hit compiles nothing)
leaves no file, and `00_cut.txt` names the files that are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchlazy.lazy.inspect.graph_dot import dot_text
from torchlazy.lazy.run.text import constructed_by, graph_text, timings_text

if TYPE_CHECKING:
    from torch import fx

STAGES = ("cut", "trace", "aten", "prims", "loop_ir", "fusion", "kernels", "program", "memory", "graph")
SUFFIXES = {"cpp": ".cpp", "numba": ".py", "triton": ".py"}
COMMENTS = {".cpp": "//", ".py": "#", ".txt": "#"}


@dataclass(frozen=True)
class CutRecord:
    """What is known about one cut. Empty strings and None stand for stages that did not run.

    `timings` maps stage names (those of `STAGES`, or any other) to seconds in the order in which they ran; `sources`
    are (name, language, text) of the kernels in launch order; `notes` are further lines for `00_cut.txt`.
    """

    cause: str
    frame: str = ""
    trace_text: str = ""
    aten_graph: fx.Graph | None = None
    prims_graph: fx.Graph | None = None
    loop_ir_text: str = ""
    fusion_text: str = ""
    sources: tuple[tuple[str, str, str], ...] = ()
    program_text: str = ""
    memory_text: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check_stages(stages: Iterable[str] | None) -> tuple[str, ...]:
    """The chosen stages in pipeline order; None chooses all of them."""
    if stages is None:
        return STAGES
    chosen = (stages,) if isinstance(stages, str) else tuple(stages)
    unknown = [stage for stage in chosen if stage not in STAGES]
    if unknown:
        raise ValueError(f"dump: unknown stages {unknown}; choose from {', '.join(STAGES)}")
    return tuple(stage for stage in STAGES if stage in chosen)


def folder_name(number: int, cause: str) -> str:
    """(7, "sync: item()") -> "0007_sync_item": sorts by number, legal on every file system."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", cause).strip("_")[:40].rstrip("_")
    return f"{number:04d}_{words}" if words else f"{number:04d}"


def write_cut_folder(root: Path, number: int, record: CutRecord, stages: Iterable[str] | None = None) -> Path:
    """Write the files of one cut under `root` and return their folder."""
    chosen = check_stages(stages)
    folder = Path(root) / folder_name(number, record.cause)
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: text for name, text in _files(record, chosen).items() if text}
    if "cut" in chosen:
        files = {"00_cut.txt": _cut_text(number, record, tuple(files)), **files}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return folder


def _files(record: CutRecord, chosen: tuple[str, ...]) -> dict[str, str]:
    """File name -> text for every chosen stage but the cut itself; empty texts stand for absent stages."""
    files: dict[str, str] = {}

    def add_text(stage: str, name: str, text: str) -> None:
        if stage in chosen and text:
            files[name] = _headed(text, stage, name, record)

    add_text("trace", "01_trace.txt", record.trace_text)
    for stage, name, graph in (("aten", "02_aten.py", record.aten_graph), ("prims", "03_prims.py", record.prims_graph)):
        if stage in chosen and graph is not None:
            files[name] = graph_text(graph, stage, record.timings.get(stage))
    add_text("loop_ir", "04_loop_ir.txt", record.loop_ir_text)
    add_text("fusion", "05_fusion.txt", record.fusion_text)
    for position, (kernel, language, text) in enumerate(record.sources):
        suffix = SUFFIXES.get(language, ".txt")
        safe = re.sub(r"[^A-Za-z0-9_]+", "_", kernel)[:60]
        add_text("kernels", f"06_kernels/{position:03d}_{safe}{suffix}", text)
    add_text("program", "07_program.txt", record.program_text)
    add_text("memory", "08_memory.txt", record.memory_text)
    picture = record.prims_graph if record.prims_graph is not None else record.aten_graph
    if "graph" in chosen and picture is not None:
        files["graph.dot"] = dot_text(picture)
    return files


def _headed(text: str, stage: str, name: str, record: CutRecord) -> str:
    comment = COMMENTS[Path(name).suffix]
    return f"{comment} {constructed_by(stage, record.timings.get(stage))}\n{text}"


def _cut_text(number: int, record: CutRecord, files: tuple[str, ...]) -> str:
    lines = [f"cut {number}", f"cause  {record.cause}", f"frame  {record.frame or 'not known'}"]
    lines += record.notes
    if record.timings:
        lines += ["", "durations", timings_text(record.timings)]
    return "\n".join([*lines, "", "files", *files])
