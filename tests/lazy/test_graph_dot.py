"""The DOT text of a graph: well-formed whatever it holds, a box for every value, a line for every reading."""

from __future__ import annotations

import operator
import re
import shutil
import subprocess

import pytest
import torch
from torch import fx
from torchlazy.lazy.inspect.graph_dot import dot_text, kind_of
from torchlazy.prims import ops as prims
from torchlazy.prims.meta import TensorMeta

aten = torch.ops.aten
STRING = r'"(?:[^"\\\n]|\\["\\n])*"'
BOX = re.compile(rf"({STRING}) \[((?: ?\w+={STRING})+)\]")
LINE = re.compile(rf"({STRING}) -> ({STRING})")


def read(text: str) -> tuple[dict[str, dict[str, str]], set[tuple[str, str]], str]:
    """Attributes of the boxes by name, lines from source to reader, and the title; every line must be one of these."""
    first, title, style, *rest = text.splitlines()
    assert (first, rest.pop()) == ("digraph {", "}")
    assert re.fullmatch(rf"label={STRING} labelloc=t", title)
    assert re.fullmatch(rf"node \[(?: ?\w+=(?:{STRING}|\w+))+\]", style)
    boxes: dict[str, dict[str, str]] = {}
    lines = set()
    for line in rest:
        if box := BOX.fullmatch(line):
            assert unquoted(box[1]) not in boxes
            pairs = re.findall(rf"(\w+)=({STRING})", box[2])
            boxes[unquoted(box[1])] = {name: unquoted(value) for name, value in pairs}
        else:
            found = LINE.fullmatch(line)
            assert found, line
            lines.add((unquoted(found[1]), unquoted(found[2])))
    assert {name for line in lines for name in line} <= set(boxes)
    return boxes, lines, title


def unquoted(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text[1:-1])


def prims_graph() -> fx.Graph:
    """softmax's numerator and its sum, and a matrix product of it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorMeta((8, 16), torch.float32, (16, 1))
    exp = graph.call_function(prims.exp, (x,))
    total = graph.call_function(prims.sum, (exp,), {"axes": (1,)})
    turned = graph.call_function(prims.permute, (exp,), {"dims": (1, 0)})
    product = graph.call_function(prims.extern(aten.mm.default), (exp, turned))
    product.meta.update(val=TensorMeta((8, 8), torch.float32, (8, 1)), frame='c:\\new\\model.py:41 in "a & b"\\')
    graph.output((total, product, product))
    return graph


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
    boxes, lines, _ = read(dot_text(graph))
    assert [box["label"] for box in boxes.values()] == ["x", "full_1", "add (1e-05)", "output 0", "output 1"]
    assert lines == {("x", "add"), ("add", "output-0"), ("full_1", "output-1")}


def test_every_value_and_every_output_has_a_box_with_its_call_and_line():
    boxes, lines, title = read(dot_text(prims_graph()))
    assert len(boxes) == 5 + 3
    assert boxes["x"]["label"] == "x\nfloat32[8, 16]"
    product = next(source for source, reader in lines if reader == "output-1")
    assert (product, "output-2") in lines
    assert boxes[product]["label"].endswith("\nfloat32[8, 8]")
    assert boxes[product]["tooltip"].startswith(f"{product} = ")
    assert boxes[product]["tooltip"].endswith('\nc:\\new\\model.py:41 in "a & b"\\')
    assert {reader for source, reader in lines if source == "exp"} == {"sum_1", "permute", product}
    assert "input 1, pointwise 1, reduction 1, view 1, extern 1, output 3" in title


def test_an_empty_graph_is_a_picture_too():
    graph = fx.Graph()
    graph.output(())
    assert read(dot_text(graph))[:2] == ({}, set())


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it():
    drawn = subprocess.run(["dot", "-Tsvg"], input=dot_text(prims_graph()), capture_output=True, text=True, check=True)
    assert drawn.stdout.count('class="node"') == 8
    assert "in &quot;a &amp; b&quot;" in drawn.stdout
