"""The picture of a graph: well-formed, nothing overlaps, readers below sources, far sources named and not drawn."""

from __future__ import annotations

import operator
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
import torch
from torch import fx
from torchlazy.lazy.inspect.graph_layout import GAP_X, MAX_SPAN, ROW_LIMIT, Box, nearest_places, plan_layout
from torchlazy.lazy.inspect.graph_svg import draw_graph, kind_of, picture_nodes
from torchlazy.prims import ops as prims
from torchlazy.prims.meta import TensorMeta

aten = torch.ops.aten
SVG = "{http://www.w3.org/2000/svg}"


def prims_graph() -> fx.Graph:
    """softmax's numerator and its sum, and a matrix product of it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorMeta((8, 16), torch.float32, (16, 1))
    exp = graph.call_function(prims.exp, (x,))
    total = graph.call_function(prims.sum, (exp,), {"axes": (1,)})
    turned = graph.call_function(prims.permute, (exp,), {"dims": (1, 0)})
    product = graph.call_function(prims.extern(aten.mm.default), (exp, turned))
    product.meta.update(val=TensorMeta((8, 8), torch.float32, (8, 1)), frame='model.py:41 in <module> "a & b"')
    graph.output((total, product, product))
    return graph


def deep_boxes(depth: int, width: int = 1) -> list[Box]:
    """`width` chains of `depth` boxes that all read the first box again at every tenth step."""
    boxes = [Box("root", 60, 20), Box("weight", 60, 20)]
    boxes.append(Box("start", 60, 20, ("root", "weight")))
    for chain in range(width):
        before = "start"
        for step in range(depth):
            name = f"c{chain}_{step}"
            boxes.append(Box(name, 40 + 13 * (step % 5), 20, (before, "start") if step % 10 == 9 else (before,)))
            before = name
    return boxes


def test_kinds_of_primitives_and_of_aten_operators():
    kinds = [kind_of(node) for node in prims_graph().nodes if node.op != "output"]
    assert kinds == ["input", "pointwise", "reduction", "view", "extern"]
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [
        (aten.arange.default, (4,), "creation"),
        (aten.relu.default, (x,), "pointwise"),
        (aten.sum.default, (x,), "reduction"),
        (aten.view.default, (x, [4]), "view"),
        (operator.getitem, (x, 0), "view"),
        (aten.mm.default, (x, x), "extern"),
    ]
    for target, args, kind in calls:
        assert kind_of(graph.call_function(target, args)) == kind


def test_a_constant_stands_in_its_readers_box():
    graph = fx.Graph()
    x = graph.placeholder("x")
    small = graph.call_function(prims.full, (), {"shape": (4,), "value": 1e-5, "dtype": torch.float32, "device": "cpu"})
    returned = graph.call_function(prims.full, (), {"shape": (4,), "value": 2, "dtype": torch.int64, "device": "cpu"})
    graph.output((graph.call_function(prims.add, (x, small)), returned))
    nodes = picture_nodes(graph)
    assert [node.lines[0] for node in nodes] == ["x", "full_1", "add (1e-05)", "output 0", "output 1"]
    assert nodes[2].sources == ("x",)


def test_every_value_and_every_output_has_a_box():
    nodes = picture_nodes(prims_graph())
    assert [node.name for node in nodes][-3:] == ["output-0", "output-1", "output-2"]
    assert nodes[-1].sources == nodes[-2].sources
    assert nodes[0].lines == ("x", "float32[8, 16]")


def test_svg_is_well_formed_with_a_link_target_and_a_hint_for_each_box():
    root = ElementTree.fromstring(draw_graph(prims_graph()))
    groups = {g.get("id"): g for g in root.iter(f"{SVG}g") if g.get("id")}
    assert len(groups) == 5 + 3
    hints = [g.findtext(f"{SVG}title") or "" for g in groups.values()]
    assert any('in <module> "a & b"' in hint for hint in hints)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"output 0", "extern 1", "float32[8, 8]"} <= texts


def test_readers_lie_below_their_sources_and_boxes_do_not_overlap():
    boxes = deep_boxes(40, width=5)
    layout = plan_layout(boxes)
    for box in boxes:
        for source in box.sources:
            assert layout.boxes[source].y + box.height < layout.boxes[box.name].y
    rows: dict[int, list[tuple[float, float]]] = {}
    for box in boxes:
        placed = layout.boxes[box.name]
        rows.setdefault(placed.row, []).append((placed.x - box.width / 2, placed.x + box.width / 2))
        assert placed.x - box.width / 2 > -1e-6
        assert placed.x + box.width / 2 < layout.width + 1e-6
    for spans in rows.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start - end > GAP_X - 1e-6


def test_far_sources_are_named_and_near_ones_are_drawn():
    layout = plan_layout(deep_boxes(40))
    assert layout.boxes["c0_9"].far == ("start",)
    assert layout.boxes["c0_8"].far == ()
    drawn = {(source, reader) for source, reader, _ in layout.lines}
    assert ("c0_8", "c0_9") in drawn
    assert ("start", "c0_9") not in drawn
    assert all(layout.boxes[r].row - layout.boxes[s].row <= MAX_SPAN for s, r in drawn)


def test_a_chain_from_an_input_stands_directly_above_its_reader():
    boxes = [Box("w", 40, 20), Box("t", 40, 20, ("w",)), Box("a", 40, 20), Box("b", 40, 20)]
    boxes += [Box("x0", 40, 20, ("a", "b")), *(Box(f"x{i}", 40, 20, (f"x{i - 1}", "b")) for i in range(1, 20))]
    boxes.append(Box("mm", 40, 20, ("x19", "t")))
    rows = {name: placed.row for name, placed in plan_layout(boxes).boxes.items()}
    assert rows["t"] == rows["mm"] - 1
    assert rows["w"] == rows["mm"] - 2
    assert min(rows.values()) == 0


def test_parallel_work_wraps_into_rows():
    boxes = [Box("a", 40, 20), Box("b", 40, 20), *(Box(f"u{i}", 40, 20, ("a", "b")) for i in range(100))]
    layout = plan_layout(boxes)
    counts: dict[int, int] = {}
    for placed in layout.boxes.values():
        counts[placed.row] = counts.get(placed.row, 0) + 1
    assert max(counts.values()) <= ROW_LIMIT


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [((0.0, 500.0), (0.0, 500.0)), ((0.0, 0.0), (-29.0, 29.0)), ((100.0, 0.0), (21.0, 79.0))],
)
def test_nearest_places(wanted, expected):
    assert nearest_places(wanted, (40.0, 40.0)) == pytest.approx(list(expected))


def test_a_thousand_nodes_take_little_time_and_give_the_same_page_twice():
    boxes = deep_boxes(100, width=10)
    started = time.thread_time()
    first = plan_layout(boxes)
    assert time.thread_time() - started < 5
    assert plan_layout(boxes) == first
    assert first.width < 5000


def test_an_empty_graph_is_a_picture_too():
    graph = fx.Graph()
    graph.output(())
    ElementTree.fromstring(draw_graph(graph))
