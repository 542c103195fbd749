"""The operators that an exported file may name: those that a recording can hold, and none that does more than compute.

Invariant: `runtime/exported/operators.py` is what `generated` returns; UPDATE_GOLDEN=1 writes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torchlazy.prims import coverage
from torchlazy.runtime.exported import operators

# Kernels that torch chooses by itself in the place of others, and quantisation that computes on plain tensors.
CHOSEN = re.compile(
    r"aten\.(mkldnn_rnn_layer|_scaled_mm|_scaled_mm_v2|_scaled_grouped_mm|_scaled_grouped_mm_v2|_weight_int\w*pack_mm\w*|"
    r"_?fake_quantize\w*|_thnn_fused_(gru|lstm)_cell)\."
)
OWN = ("torchlazy.checked.default", "torchlazy.random_bits.default")
ARGUMENTS = {
    "TensorType", "IntType", "SymIntType", "FloatType", "BoolType", "NumberType", "DeviceObjType", "StringType"
}  # fmt: skip
HEAD = '''"""The operators of torch that an exported file may name without being asked for, written by
tests/runtime/test_exported_operators.py: what a recording can hold (torchlazy.prims.coverage), and a few more.

Invariant: each is functional, takes tensors, numbers, dtypes, devices and modes, and gives tensors: no file, no memory
by address, no generator, no name.
"""

from __future__ import annotations

_NAMES = """
'''


def base(kind: Any) -> str:
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return str(kind.kind())


def takes_plain_values(overload: torch._ops.OpOverload) -> bool:
    schema = overload._schema
    return not schema.is_mutable and {base(argument.type) for argument in schema.arguments} <= ARGUMENTS


def generated() -> str:
    chosen = [o for o in coverage.overloads() if CHOSEN.match(str(o))]
    names = [str(o) for o in (*coverage.aten_overloads(), *chosen) if takes_plain_values(o)]
    lines = [""]
    for name in sorted({*names, *OWN}):
        if len(lines[-1]) + len(name) > 119:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + name
    return HEAD + "\n".join(lines) + '\n"""\n\nOPERATORS = frozenset(_NAMES.split())\n'


def test_the_table_is_what_recordings_hold() -> None:
    file = Path(operators.__file__)
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(generated())
    assert file.read_text() == generated(), "UPDATE_GOLDEN=1 writes it; read the difference: files may name these"


def test_no_operator_of_the_table_reaches_beyond_tensors() -> None:
    for name in operators.OPERATORS:
        namespace, packet, overload = name.split(".")
        schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
        assert not schema.is_mutable and {base(argument.type) for argument in schema.arguments} <= ARGUMENTS, name
        assert "Tensor" in str(schema.returns[0].type), name
        for word in ("file", "storage", "resize", "sparse", "nested", "_test"):
            assert word not in packet, name
    assert "aten.from_file.default" not in operators.OPERATORS
