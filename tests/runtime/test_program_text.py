"""Programs as readable text and as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.memory_plan import plan_memory
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Launch,
    Program,
    Reinterpret,
    ValueRef,
)
from torchlazy.runtime.program.text import format_memory, format_program, from_json, to_json

from .tiny_sources import cpp_foreach, cpp_gather, cpp_scale


def sample() -> Program:
    vector = TensorMeta((64,), torch.float32, (1,))
    square = TensorMeta((8, 8), torch.bfloat16, (1, 8), "cuda:0")
    steps = (
        Allocate("a", vector),
        Launch(0, ("x", "a"), ("lr",), (64,)),
        Reinterpret("w", "a", square, 0),
        ExternCall(
            "aten.add.Tensor",
            (ValueRef("w"), (1, (ValueRef("lr", scalar=True), None)), float("inf"), -0.0, 1 + 2j, [1, 2], "mean"),
            (("dtype", torch.float64), ("device", torch.device("cuda:0")), ("layout", torch.strided),
             ("memory_format", torch.channels_last), ("flag", True)),
            ("b", None), (vector, None),
        ),
        Allocate("out", vector),
        ForeachLaunch(1, ((("b", "out"), (64,), ("lr",)),), ("n",)),
    )  # fmt: skip
    return Program(
        inputs=(("x", vector),),
        scalars=(("lr", float), ("n", int)),
        kernels=(cpp_scale(), cpp_foreach(), cpp_gather()),
        steps=plan_memory(steps, inputs=(("x", vector),), outputs=("out",)),
        outputs=("out",),
        output_metas=(vector,),
        donations=((0, 0),),
        notes=(("took", {"fusion": 1.5}), ("nothing", ())),
    )


def test_json_round_trip() -> None:
    program = sample()
    text = to_json(program)
    assert from_json(text) == program
    assert to_json(from_json(text)) == text
    assert repr(from_json(text)) == repr(program)
    assert [kernel.key for kernel in from_json(text).kernels] == [kernel.key for kernel in program.kernels]


def test_metadata_stands_in_the_file_once() -> None:
    data = json.loads(to_json(sample()))
    assert [meta["shape"] for meta in data["metas"]] == [[64], [8, 8]]
    assert "TensorMeta" not in json.dumps(data)


def test_text_names_steps_buffers_and_peak() -> None:
    text = format_program(sample())
    assert "kernel0(x, a, lr, 64)" in text
    assert "w = window on a at 0: bfloat16[8, 8]" in text
    assert "free w" in text or "free a, w" in text
    assert "output out: float32[64] strides [1] on cpu in the memory of x" in text
    assert "peak 512 B of 768 B" in text
    memory = format_memory(sample())
    assert memory.splitlines()[0].startswith("peak 512 B") and "free" in memory


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"torchlazy program": 99, "program": null}',
        '{"torchlazy program": 3, "metas": [], "program": {"system": "x"}}',
        '{"torchlazy program": 3, "metas": [], "program": {"torch": "save"}}',
        '{"torchlazy program": 3, "metas": [], "program": {"Free": {"names": []}}}',
        '{"torchlazy program": 3, "metas": [], "program": {"meta": 0}}',
        '{"torchlazy program": 3, "metas": [{"shape": []}], "program": {"meta": -1}}',
    ],
)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="compile"):
        from_json(text)


def test_a_damaged_file_is_refused() -> None:
    data = json.loads(to_json(sample()))
    data["program"]["Program"].pop("steps")
    with pytest.raises(ProgramError, match="damaged"):
        from_json(json.dumps(data))


def test_values_without_a_form_are_named() -> None:
    program = Program((), (), (), (ExternCall("aten.neg.default", (object(),), (), ("a",), (None,)),), ("a",), ())
    with pytest.raises(ProgramError, match="no form for <object"):
        to_json(program)
