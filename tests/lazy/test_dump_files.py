"""The folder of one cut: which files, what is in them, and that printed graphs are Python that runs."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch
from torch import fx
from torchlazy.lazy.inspect.dump import extern_lines
from torchlazy.lazy.inspect.dump_files import STAGES, CutRecord, folder_name, write_cut_folder
from torchlazy.lazy.run.text import byte_text, cut_line, duration_text, graph_text, literal_text, meta_text, table_text
from torchlazy.prims import ops as prims
from torchlazy.prims.builder import Fallback
from torchlazy.prims.meta import ScalarMeta, TensorMeta

aten = torch.ops.aten
MATRIX = TensorMeta((3, 4), torch.float32, (4, 1))


def aten_graph() -> fx.Graph:
    graph = fx.Graph()
    x, rate = graph.placeholder("x"), graph.placeholder("rate")
    x.meta["val"], rate.meta["val"] = MATRIX, ScalarMeta(float)
    scaled = graph.call_function(aten.mul.Scalar, (x, rate))
    scaled.meta.update(val=MATRIX, frame="model.py:41")
    cut = graph.call_function(aten.clamp.default, (scaled, float("-inf"), 1.5))
    cut.meta.update(val=MATRIX, frame="model.py:41")
    turned = graph.call_function(aten.t.default, (cut,))
    turned.meta.update(val=TensorMeta((4, 3), torch.float32, (1, 4)), frame="model.py:42")
    double = graph.call_function(aten._to_copy.default, (turned,), {"dtype": torch.float64})
    double.meta.update(val=TensorMeta((4, 3), torch.float64, (1, 4)))
    graph.output((turned, double))
    return graph


def prims_graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = MATRIX
    exp = graph.call_function(prims.exp, (x,))
    exp.meta.update(val=MATRIX, frame="model.py:7")
    total = graph.call_function(prims.sum, (exp,), {"axes": (1,)})
    total.meta.update(val=TensorMeta((3,), torch.float32, (1,)))
    turned = graph.call_function(prims.permute, (exp,), {"dims": (1, 0)})
    turned.meta.update(val=TensorMeta((4, 3), torch.float32, (1, 4)))
    product = graph.call_function(prims.extern(aten.mm.default), (exp, turned))
    product.meta.update(val=TensorMeta((3, 3), torch.float32, (3, 1)))
    graph.output((total, product))
    return graph


def full_record() -> CutRecord:
    return CutRecord(
        cause="sync: item()",
        frame="train.py:12",
        trace_text="%0 = aten.mul.Scalar(...)",
        aten_graph=aten_graph(),
        prims_graph=prims_graph(),
        loop_ir_text="buf0[i] = exp(x[i])",
        fusion_text="exp + sum: fused",
        sources=(("sum_exp", "cpp", "void f();"), ("sum exp/2", "triton", "def f(): pass")),
        program_text="launch 0",
        memory_text="buf0: 48 bytes",
        timings={"aten": 0.0012, "prims": 0.25, "kernels": 3.0},
        notes=("outcome compiled",),
    )


def run_text(text: str, *inputs: object) -> object:
    space: dict[str, object] = {}
    exec(compile(text, "printed", "exec"), space)
    return space["program"](*inputs)  # type: ignore[operator]


def test_all_stages_give_all_files(tmp_path):
    folder = write_cut_folder(tmp_path, 7, full_record())
    assert folder == tmp_path / "0007_sync_item"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == [
        "00_cut.txt", "01_trace.txt", "02_aten.py", "03_prims.py", "04_loop_ir.txt", "05_fusion.txt",
        "06_kernels/000_sum_exp.cpp", "06_kernels/001_sum_exp_2.py", "07_program.txt", "08_memory.txt", "graph.dot",
    ]  # fmt: skip
    cut = (folder / "00_cut.txt").read_text()
    for part in ("sync: item()", "train.py:12", "outcome compiled", "3.25 s", *names[1:]):
        assert part in cut
    assert (folder / "02_aten.py").read_text().startswith("# constructed by aten (took 1.2 ms)\n")
    assert (folder / "06_kernels/000_sum_exp.cpp").read_text() == "// constructed by kernels (took 3 s)\nvoid f();\n"
    ast.parse((folder / "06_kernels/001_sum_exp_2.py").read_text())


def test_stages_select_files(tmp_path):
    folder = write_cut_folder(tmp_path, 1, full_record(), stages=("prims", "cut"))
    assert sorted(path.name for path in folder.iterdir()) == ["00_cut.txt", "03_prims.py"]
    with pytest.raises(ValueError, match=r"unknown stages \['prim'\]; choose from cut, trace, aten"):
        write_cut_folder(tmp_path, 2, full_record(), stages=["prim"])
    assert not (tmp_path / "0002_sync_item").exists()


def test_a_hit_without_graphs_leaves_only_what_it_has(tmp_path):
    folder = write_cut_folder(tmp_path, 3, CutRecord(cause="flush: optimizer step", trace_text="%0"), STAGES)
    assert sorted(path.name for path in folder.iterdir()) == ["00_cut.txt", "01_trace.txt"]
    assert "not known" in (folder / "00_cut.txt").read_text()


def test_extern_calls_are_told_once_with_their_number():
    product = Fallback("aten.addmm.default", "a contraction", "model.py:4", by_choice=True)
    gap = Fallback("aten.cholesky.default", "no rule", "model.py:5")
    assert extern_lines((product, gap, replace(product, frame="model.py:9"))) == (
        "extern: 2 x aten.addmm.default: a contraction",
        "extern: 1 x aten.cholesky.default: no rule",
    )


def test_folder_names_are_legal_and_sort():
    assert folder_name(12, "") == "0012"
    assert folder_name(3, "sync: a/b\\c " + "x" * 80) == "0003_sync_a_b_c_" + "x" * 29
    assert len(folder_name(1, "y" * 500)) == 45


def test_a_printed_aten_graph_runs():
    text = graph_text(aten_graph(), "aten")
    x = torch.randn(3, 4)
    turned, double = run_text(text, x, 2.0)
    torch.testing.assert_close(turned, (x * 2).clamp(max=1.5).t())
    torch.testing.assert_close(double, turned.double())
    lines = {line.split("(")[0].split(" = ")[1]: line for line in text.splitlines() if " = aten." in line}
    assert lines["aten.mul.Scalar"].endswith("# float32[3, 4]  model.py:41")
    assert lines["aten.t.default"].endswith("# float32[4, 3] strides (1, 4)  model.py:42")


def test_a_printed_prims_graph_runs():
    x = torch.randn(3, 4)
    total, product = run_text(graph_text(prims_graph(), "prims"), x)
    torch.testing.assert_close(total, x.exp().sum(1))
    torch.testing.assert_close(product, x.exp() @ x.exp().t())


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1.5, float("inf"), "mean", (1,), (), [1, (2.0, None)], torch.float16, torch.device("cuda:1"),
     torch.contiguous_format, torch.strided, slice(1, None, 2), {"a": [1]}],
)  # fmt: skip
def test_literals_evaluate_to_themselves(value):
    assert eval(literal_text(value)) == value


def test_metadata_tells_what_is_unusual():
    assert meta_text(MATRIX) == "float32[3, 4]"
    assert meta_text(TensorMeta((2,), torch.int64, (3,), "cuda:0")) == "int64[2] strides (3) cuda:0"
    assert meta_text((MATRIX, None)) == "(float32[3, 4], None)"
    assert meta_text(ScalarMeta(int)) == "int scalar"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (1.0, "1 s"), (4321.0, "4321 s")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_bytes():
    assert [byte_text(n) for n in (0, 1023, 1536, 3 << 20, 5 << 40)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "3 MiB", "5120 GiB",
    ]  # fmt: skip


def test_tables_and_cut_lines():
    assert table_text([("a", 1), ("long", 100)], right=(1,)) == "a       1\nlong  100"
    assert table_text([]) == ""
    line = cut_line(4, "sync: item()", "train.py:12", ops=640, outcome="hit", seconds=0.002)
    assert line == "torchlazy: cut 4: sync: item() at train.py:12: 640 ops, hit, 2 ms"
