"""A graph as a picture: one SVG file, no program needed to draw it, readable in a browser up to a few thousand nodes.

Boxes are coloured by what they do; lines run from values to readers. A source that lies far above is named in the box
and is a link to it. Hovering over a box shows the call and the user's line.

Invariant: pure; the text is well-formed XML whatever names, frames or constants the graph holds.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from html import escape

import torch
from torch import fx
from torchlazy.lazy.inspect.graph_layout import Box, Layout, PlacedBox, plan_layout
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
    "output": ("#3c4043", "#202124"),
}
KIND_OF_PRIM = {
    Kind.POINTWISE: "pointwise",
    Kind.REDUCTION: "reduction",
    Kind.SCAN: "reduction",
    Kind.VIEW: "view",
    Kind.CREATION: "creation",
    Kind.RANDOM: "creation",
    Kind.INDEXING: "indexing",
    Kind.CONTRACTION: "extern",
    Kind.EXTERN: "extern",
    Kind.COLLECTIVE: "extern",
}
CHARACTER = 6.7  # width of one character of the 11 px monospace font
LINE = 14.0
MARGIN = 24.0
LEGEND = 44.0
LABEL_LIMIT = 30
NAMED_SOURCES = 2  # far sources named in a box; the others are counted


@dataclass(frozen=True)
class PictureNode:
    """One box: `lines` are its text, `hint` what hovering shows."""

    name: str
    kind: str
    lines: tuple[str, ...]
    hint: str
    sources: tuple[str, ...] = ()


def kind_of(node: fx.Node) -> str:
    """The colour class of a node of either dialect."""
    if node.op == "placeholder":
        return "input"
    target = node.target
    if target is operator.getitem:
        return "view"
    if isinstance(target, Prim):
        if target.overload is not None:
            return "extern"
        return next((name for kind, name in KIND_OF_PRIM.items() if target.is_kind(kind)), "extern")
    if not isinstance(target, torch._ops.OpOverload):
        return "extern"
    if any(result.alias_info is not None for result in target._schema.returns):
        return "view"
    if torch.Tag.pointwise in target.tags:
        return "pointwise"
    if torch.Tag.reduction in target.tags:
        return "reduction"
    return "extern" if node.all_input_nodes else "creation"


def constants(graph: fx.Graph) -> dict[fx.Node, str]:
    """Tensors of one known number that only operators read: shown as that number in the reader's box."""
    found = {}
    for node in graph.nodes:
        value = node.kwargs.get("value") if node.target is prims.full else None
        if isinstance(value, (bool, int, float)) and all(user.op != "output" for user in node.users):
            found[node] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return found


def picture_nodes(graph: fx.Graph) -> list[PictureNode]:
    """The boxes of a graph; the output node becomes one box for each returned value, constants have none."""
    nodes = []
    constant = constants(graph)
    for node in graph.nodes:
        if node in constant:
            continue
        if node.op == "output":
            nodes += [
                PictureNode(f"output-{i}", "output", (f"output {i}",), source.name, (source.name,))
                for i, source in enumerate(node.args[0])
            ]
            continue
        op = "" if node.op == "placeholder" else operator_name(node.target)
        name = node.name if op in node.name else f"{node.name}: {op}"
        name = " ".join([name, *(f"({constant[source]})" for source in node.all_input_nodes if source in constant)])
        value = node.meta.get("val", "")
        frame = str(node.meta.get("frame") or "")
        hint = [node.name if node.op == "placeholder" else f"{node.name} = {call_text(node)}"]
        meta = meta_text(value) if "val" in node.meta else ""
        nodes.append(
            PictureNode(
                node.name,
                kind_of(node),
                tuple(shorten(line) for line in (name, str(value) if isinstance(value, TensorMeta) else meta) if line),
                "\n".join(line for line in (*hint, meta, frame) if line),
                tuple(source.name for source in node.all_input_nodes if source not in constant),
            )
        )
    return nodes


def operator_name(target: object) -> str:
    """ "aten.mm.default" -> "mm": what fits in a box."""
    if isinstance(target, Prim) and target.overload is not None:
        target = target.overload
    if isinstance(target, Prim):
        return target.name
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", None) or literal_text(target)


def shorten(text: str) -> str:
    return text if len(text) <= LABEL_LIMIT else text[: LABEL_LIMIT - 3] + "..."


def draw_graph(graph: fx.Graph) -> str:
    """The SVG text of an FX graph in the ATen or the prims dialect."""
    return draw_nodes(picture_nodes(graph))


def draw_nodes(nodes: list[PictureNode]) -> str:
    """The SVG text of boxes whose sources stand before them."""
    layout = plan_layout([_box(node) for node in nodes])
    with_far = [_name_far_sources(node, layout.boxes[node.name]) for node in nodes]
    if any(far != node for far, node in zip(with_far, nodes, strict=True)):
        # Names of far sources make boxes larger, never move them to another row: one more layout settles it.
        layout = plan_layout([_box(node) for node in with_far])
    return _svg(with_far, layout)


def _box(node: PictureNode) -> Box:
    characters = max(map(len, node.lines), default=1)
    return Box(node.name, characters * CHARACTER + 16, len(node.lines) * LINE + 10, node.sources)


def _name_far_sources(node: PictureNode, placed: PlacedBox) -> PictureNode:
    if not placed.far:
        return node
    more = len(placed.far) - NAMED_SOURCES
    names = ", ".join(placed.far[:NAMED_SOURCES]) + (f" +{more}" if more > 0 else "")
    return replace(node, lines=(*node.lines, shorten(f"\N{UPWARDS ARROW} {names}")))


def _svg(nodes: list[PictureNode], layout: Layout) -> str:
    kinds = [kind for kind in COLOURS if any(node.kind == kind for node in nodes)]
    width = max(layout.width + 2 * MARGIN, 110.0 * len(kinds) + 2 * MARGIN)
    height = layout.height + 2 * MARGIN + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        _style(),
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
        *_legend(kinds, nodes),
        f'<g transform="translate({(width - layout.width) / 2:.1f} {MARGIN + LEGEND:.1f})">',
        *(_line(points) for _, _, points in layout.lines),
    ]
    for node in nodes:
        parts += _draw_box(node, layout.boxes[node.name])
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _style() -> str:
    rules = [
        "text{font:11px Menlo,Consolas,DejaVu Sans Mono,monospace;fill:#202124;text-anchor:middle}",
        "text.name{font-weight:bold}",
        "text.far{fill:#5f6368;font-size:10px}",
        "path{fill:none;stroke:#9aa0a6;stroke-width:1}",
        ".output text{fill:#fff}",
        "g:target rect{stroke:#c5221f;stroke-width:3}",
    ]
    rules += [f".{kind} rect{{fill:{fill};stroke:{border}}}" for kind, (fill, border) in COLOURS.items()]
    return "<style>" + "".join(rules) + "</style>"


def _legend(kinds: list[str], nodes: list[PictureNode]) -> list[str]:
    parts = []
    for i, kind in enumerate(kinds):
        count = sum(node.kind == kind for node in nodes)
        parts.append(
            f'<g class="{kind}"><rect x="{MARGIN + 110 * i:.0f}" y="{MARGIN:.0f}" width="102" height="20" rx="4"/>'
            f'<text x="{MARGIN + 110 * i + 51:.0f}" y="{MARGIN + 14:.0f}">{kind} {count}</text></g>'
        )
    return parts


def _line(points: tuple[tuple[float, float], ...]) -> str:
    """A smooth path: vertical where it leaves a row and where it enters the next."""
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for i, (x, y) in enumerate(points[1:], start=1):
        before_x, before_y = points[i - 1]
        if x == before_x:
            path.append(f"V{y:.1f}")
        else:
            middle = (before_y + y) / 2
            path.append(f"C{before_x:.1f} {middle:.1f} {x:.1f} {middle:.1f} {x:.1f} {y:.1f}")
    return f'<path d="{"".join(path)}"/>'


def _draw_box(node: PictureNode, placed: PlacedBox) -> list[str]:
    box = _box(node)
    parts = [
        f'<g class="{node.kind}" id="{escape(node.name)}"><title>{escape(node.hint)}</title>',
        f'<rect x="{placed.x - box.width / 2:.1f}" y="{placed.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="5"/>',
    ]
    for i, line in enumerate(node.lines):
        is_far = bool(placed.far) and i == len(node.lines) - 1
        style = ' class="far"' if is_far else ' class="name"' if i == 0 else ""
        text = f'<text x="{placed.x:.1f}" y="{placed.y + LINE * (i + 1) + 1:.1f}"{style}>{escape(line)}</text>'
        parts.append(f'<a href="#{escape(placed.far[0])}">{text}</a>' if is_far else text)
    return [*parts, "</g>"]
