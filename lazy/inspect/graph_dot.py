"""A graph as DOT, the language of Graphviz: `dot -Tsvg graph.dot` draws it, other viewers read it too.

Boxes are coloured by what they do, lines run from values to readers, and the title counts the boxes of each kind. The
tooltip of a box is the call and the user's line.

Invariant: pure; the text is well-formed DOT whatever names, frames or constants the graph holds.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx
from torchlazy.lazy.run.text import call_text, literal_text, meta_text
from torchlazy.prims import ops as prims
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.ops import Kind, Prim

# fill and border of each kind: warm colours for memory traffic, cool ones for elementwise work
COLOURS = {
    "input": ("#e8eaed", "#80868b"),
    "pointwise": ("#d2e3fc", "#4285f4"),
    "reduction": ("#fde293", "#f29900"),
    "view": ("#ffffff", "#bdc1c6"),
    "indexing": ("#cbf0f8", "#129eaf"),
    "creation": ("#e6f4ea", "#5bb974"),
    "extern": ("#fad2cf", "#d93025"),
    "output": ("#dadce0", "#202124"),
}
KIND_OF_PRIM = {
    Kind.POINTWISE: "pointwise",
    Kind.REDUCTION: "reduction",
    Kind.SCAN: "reduction",
    Kind.VIEW: "view",
    Kind.CREATION: "creation",
    Kind.RANDOM: "creation",
    Kind.INDEXING: "indexing",
}  # every other kind is "extern"


def kind_of(node: fx.Node) -> str:
    """The colour class of a node of either dialect."""
    if node.op == "placeholder":
        return "input"
    target = node.target
    if target is operator.getitem:
        return "view"
    if isinstance(target, Prim) and target.overload is None:
        return next((name for kind, name in KIND_OF_PRIM.items() if target.is_kind(kind)), "extern")
    if not isinstance(target, torch._ops.OpOverload):
        return "extern"
    if any(result.alias_info is not None for result in target._schema.returns):
        return "view"
    for kind in ("pointwise", "reduction"):
        if getattr(torch.Tag, kind) in target.tags:
            return kind
    return "extern" if node.all_input_nodes else "creation"


def dot_text(graph: fx.Graph) -> str:
    """The DOT text of an FX graph in the ATen or the prims dialect.

    Each returned value has a box of its own; a constant has none, and its number stands in the boxes of its readers.
    """
    constants, counts, lines = _constants(graph), Counter[str](), list[str]()

    def add_box(name: str, kind: str, label: Iterable[str], hint: Iterable[str], sources: Iterable[fx.Node]) -> None:
        fill, border = COLOURS[kind]
        counts[kind] += 1
        text = f"label={_quoted(*label)} tooltip={_quoted(*hint)}"
        lines.append(f'{_quoted(name)} [{text} fillcolor="{fill}" color="{border}"]')
        lines.extend(f"{_quoted(source.name)} -> {_quoted(name)}" for source in sources if source not in constants)

    for node in graph.nodes:
        if node.op == "output":
            for i, source in enumerate(node.args[0]):
                add_box(f"output-{i}", "output", [f"output {i}"], [source.name], [source])
        elif node not in constants:
            op = "" if node.op == "placeholder" else _operator_name(node.target)
            numbers = [f"({constants[source]})" for source in node.all_input_nodes if source in constants]
            title = " ".join([node.name if op in node.name else f"{node.name}: {op}", *numbers])
            meta = meta_text(value) if (value := node.meta.get("val")) is not None else ""
            call = node.name if node.op == "placeholder" else f"{node.name} = {call_text(node)}"
            label = (title, str(value) if isinstance(value, TensorMeta) else meta)
            add_box(node.name, kind_of(node), label, (call, meta, node.meta.get("frame") or ""), node.all_input_nodes)
    title = _quoted(", ".join(f"{kind} {counts[kind]}" for kind in COLOURS if counts[kind]))
    style = 'node [shape=box style="rounded,filled" fontname="monospace" fontsize=11]'
    return "\n".join(["digraph {", f"label={title} labelloc=t", style, *lines, "}", ""])


def _constants(graph: fx.Graph) -> dict[fx.Node, str]:
    """Tensors of one known number that only operators read."""
    found = {}
    for node in graph.nodes:
        value = node.kwargs.get("value") if node.target is prims.full else None
        if isinstance(value, (bool, int, float)) and all(user.op != "output" for user in node.users):
            found[node] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return found


def _operator_name(target: object) -> str:
    """ "aten.mm.default" -> "mm": what fits in a box."""
    if isinstance(target, Prim):
        if target.overload is None:
            return target.name
        target = target.overload
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", None) or literal_text(target)


def _quoted(*lines: object) -> str:
    """The lines that are not empty as one DOT string."""
    text = "\n".join(str(line) for line in lines if line)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
