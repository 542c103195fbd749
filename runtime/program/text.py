"""Programs as text: readable for dumps, and as JSON so that a program can be stored and loaded without any compiler.

Invariant: `from_json(to_json(program)) == program` for every program of concrete sizes. JSON holds data only; reading a
file calls nothing that the file names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.errors import OtherVersion, ProgramError
from torchlazy.runtime.program.memory_plan import held_bytes, plan_report
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    KernelSource,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)
from torchlazy.runtime.program.step_table import steps_of, table_of
from torchlazy.runtime.program.steps import span_bytes
from torchlazy.runtime.program.symbolic import FloatName, SizeName
from typing_extensions import assert_never

_VERSION = 3
_CLASSES = {
    cls.__name__: cls
    for cls in (
        Program, KernelSource, TensorMeta, Allocate, Reinterpret, Launch, ForeachLaunch, ValueRef, ExternCall, Free,
    )
}  # fmt: skip
_FIELDS = {cls: tuple(item.name for item in fields(cls)) for cls in _CLASSES.values()}
_TYPES = {"float": float, "int": int, "bool": bool, "complex": complex}
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


# ---- readable text


def format_program(program: Program) -> str:
    """Inputs, kernels, steps and outputs, a line each."""
    lines = [f"program: {len(program.steps)} steps, {len(program.kernels)} kernels, {_format_report(program)}"]
    lines += [f"input {name}: {_meta(meta)}" for name, meta in program.inputs]
    lines += [f"scalar {name}: {kind.__name__}" for name, kind in program.scalars]
    for number, kernel in enumerate(program.kernels):
        traits = ", foreach" if kernel.foreach else ""
        traits += f", {len(kernel.index_checks)} index checks" if kernel.index_checks else ""
        lines.append(f"kernel{number}: {kernel.language} {kernel.entry}, key {kernel.key[:12]}{traits}")
    lines += [f"  {_format_step(step)}" for step in program.steps]
    donated = {output: program.inputs[position][0] for output, position in program.donations}
    for number, (name, meta) in enumerate(zip(program.outputs, program.output_metas, strict=True)):
        place = f" in the memory of {donated[number]}" if number in donated else ""
        lines.append(f"output {name}: {_meta(meta)}{place}")
    lines += [f"note {name}: {value}" for name, value in program.notes]
    return "\n".join(lines) + "\n"


def format_memory(program: Program) -> str:
    """The bytes that the program holds at each step that changes them."""
    lines = [_format_report(program)]
    before = 0
    for position, (step, held) in enumerate(zip(program.steps, held_bytes(program.steps), strict=True)):
        if held != before:
            lines.append(f"{position:5} {_bytes(held):>12}  {_format_step(step)}")
        before = held
    return "\n".join(lines) + "\n"


def _format_report(program: Program) -> str:
    report = plan_report(program.steps)
    return f"peak {_bytes(report.peak_bytes)} of {_bytes(report.total_bytes)} in all values, {report.reused} reused"


def _format_step(step: Step) -> str:
    if isinstance(step, Allocate):
        place = f" in the memory of {step.reuse}" if step.reuse else ""
        return f"{step.name} = allocate {_meta(step.meta)}{place}  # {_bytes(span_bytes(step.meta))}"
    if isinstance(step, Reinterpret):
        return f"{step.name} = window on {step.source} at {step.offset}: {_meta(step.meta)}"
    if isinstance(step, Launch):
        return f"kernel{step.kernel}({', '.join([*step.buffers, *step.scalars, *map(str, step.sizes)])})"
    if isinstance(step, ForeachLaunch):
        rows = "".join(f"\n    {', '.join([*buffers, *map(str, sizes), *own])}" for buffers, sizes, own in step.rows)
        return f"kernel{step.kernel} foreach {len(step.rows)} rows, ({', '.join(step.scalars)}){rows}"
    if isinstance(step, ExternCall):
        arguments = [_argument(value) for value in step.args]
        arguments += [f"{name}={_argument(value)}" for name, value in step.kwargs]
        results = ", ".join(name or "_" for name in step.outputs)
        metas = ", ".join(_meta(meta) if meta else "_" for meta in step.metas)
        return f"{results} = {step.op}({', '.join(arguments)})  # {metas}"
    if isinstance(step, Free):
        return f"free {', '.join(step.names)}"
    assert_never(step)


def _meta(meta: TensorMeta) -> str:
    return f"{meta} strides {list(meta.strides)} on {meta.device}"


def _argument(value: Any) -> str:
    if isinstance(value, ValueRef):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value)


def _bytes(count: int) -> str:
    size, units = float(count), ["KiB", "MiB", "GiB"]
    if count < 10_000:
        return f"{count} B"
    unit = "B"
    while size >= 1000 and units:
        size, unit = size / 1024, units.pop(0)
    return f"{size:.1f} {unit}"


# ---- JSON


def to_json(program: Program) -> str:
    """The program as JSON text; each distinct metadata, and each kind of step, stands in it once."""
    if program.symbols:  # names of sizes equal the numbers that they stand for, and would give way to them
        data = {"metas": [], "program": _encode(program, None)}
    else:
        metas: dict[TensorMeta, int] = {}
        kinds, numbers, names = table_of(program.steps)
        inputs = {"names": [name for name, _ in program.inputs], "metas": _numbers(program.inputs, metas)}
        bare = _encode(replace(program, steps=(), inputs=()), metas)
        steps = {"kinds": _encode(tuple(kinds), metas), "numbers": numbers, "names": names}
        table = [_fields_of(meta, None) for meta in metas]
        data = {"metas": table, "program": bare, "inputs": inputs, "steps": steps}  # their metadata is in the table
    return json.dumps({"torchlazy program": _VERSION, **data}, allow_nan=False)


def _numbers(inputs: Sequence[tuple[str, TensorMeta]], metas: dict[TensorMeta, int]) -> list[int]:
    return [metas.setdefault(meta, len(metas)) for _, meta in inputs]


def from_json(text: str) -> Program:
    """The program that `to_json` wrote; ProgramError where the text is no such thing."""
    try:
        data = json.loads(text)
        version = data["torchlazy program"]
        if version != _VERSION:
            raise OtherVersion(f"program file: version {version}, this torchlazy reads {_VERSION}; compile it anew")
        metas = [TensorMeta(**{name: _decode(item, ()) for name, item in facts.items()}) for facts in data["metas"]]
        program = _decode(data["program"], metas)
        if "steps" in data:
            given, table = data["inputs"], data["steps"]
            names = [str(name) for name in given["names"]]
            inputs = tuple(zip(names, [metas[_index(number)] for number in given["metas"]], strict=True))
            steps = steps_of(_decode(table["kinds"], metas), table["numbers"], [str(name) for name in table["names"]])
            program = replace(program, steps=steps, inputs=inputs)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ProgramError(f"program file: damaged or of another kind ({error}); compile the program anew") from error
    if not isinstance(program, Program):
        raise ProgramError(f"program file: holds a {type(program).__name__}; compile the program anew")
    return program


def _encode(value: Any, metas: dict[TensorMeta, int] | None) -> Any:
    """JSON for one value: numbers, strings and None as they are, lists for tuples, tagged objects for the rest.

    `metas` numbers metadata, which is then told by number; None: it is told where it stands."""
    kind = type(value)
    if kind is str or kind is int or value is None or kind is bool:
        return value
    if kind is tuple:
        return [_encode(item, metas) for item in value]
    if kind in _FIELDS:
        if kind is TensorMeta and metas is not None:
            return {"meta": metas.setdefault(value, len(metas))}
        return {kind.__name__: _fields_of(value, metas)}
    if kind is SizeName or kind is FloatName:
        return {kind.__name__: [value.name, int(value) if kind is SizeName else float(value)]}
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real, metas), _encode(value.imag, metas)]}
    if isinstance(value, tuple):
        return [_encode(item, metas) for item in value]
    if isinstance(value, list):
        return {"list": [_encode(item, metas) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, metas), _encode(item, metas)] for key, item in value.items()]}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type) and value.__name__ in _TYPES:
        return {"type": value.__name__}
    raise ProgramError(
        f"program to JSON: no form for {value!r} of {type(value).__name__}; sizes must be ints, and arguments numbers, "
        f"strings, dtypes, devices, layouts or memory formats"
    )


def _fields_of(value: Any, metas: dict[TensorMeta, int] | None) -> dict[str, Any]:
    return {name: _encode(getattr(value, name), metas) for name in _FIELDS[type(value)]}


# Names of sizes, numbers and arithmetic: what `FloatName` is made of.
_FLOAT_TEXT = r"(?:n\d+|\d+(?:\.\d*)?(?:e[+-]?\d+)?|[-+*/() ])+"


def _checked(text: Any, pattern: str) -> str:
    if not isinstance(text, str) or not re.fullmatch(pattern, text):
        raise ValueError(f"{text!r} names no size")
    return text


def _decode(value: Any, metas: Sequence[TensorMeta]) -> Any:
    if isinstance(value, list):
        return tuple([_decode(item, metas) for item in value])
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "meta":
        return metas[_index(content)]
    if tag == "SizeName":
        return SizeName.of(_checked(content[0], r"n\d+"), int(content[1]))
    if tag == "FloatName":
        return FloatName.of(_checked(content[0], _FLOAT_TEXT), float(content[1]))
    if tag in _CLASSES:
        return _CLASSES[tag](**{name: _decode(item, metas) for name, item in content.items()})
    if tag == "torch":
        constant = getattr(torch, content)
        if not isinstance(constant, _TORCH_CONSTANTS):
            raise ValueError(f"torch.{content} is no dtype, layout or memory format")
        return constant
    if tag == "complex":
        return complex(*(_decode(part, metas) for part in content))
    if tag == "list":
        return [_decode(item, metas) for item in content]
    if tag == "dict":
        return {_decode(key, metas): _decode(item, metas) for key, item in content}
    decoders: dict[str, Any] = {"float": float, "device": torch.device, "type": _TYPES.__getitem__}
    return decoders[tag](content)


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no place among metadata")
    return number
