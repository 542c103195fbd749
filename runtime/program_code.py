"""A program as one flat Python function: what runs at every step is straight-line code over local variables.

Invariant: each step becomes a line or a few; nothing is looked up, counted or decided at run time that the program
fixes. A name has a tensor variable where an ATen call, an output or a window needs one, and an address variable (`_p`)
where a kernel does; windows and reused memory that only kernels touch are arithmetic on addresses.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.foreach_launch import DeviceTables, pack_rows, table_tensor, words_of_row
from torchlazy.runtime.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)
from torchlazy.runtime.steps import names_made, names_read, resolve_overload, returns_many
from torchlazy.runtime.symbolic import SizeName, size_lines
from torchlazy.runtime.toolchain import LoadedKernel
from typing_extensions import assert_never


@dataclass
class RunCode:
    """The text of `run(inputs, scalars)`, the names that it takes from its globals, and its foreach tables."""

    text: str
    names: dict[str, Any]
    tables: list[DeviceTables]


def emit_run(program: Program, kernels: Sequence[LoadedKernel]) -> RunCode:
    """Write the function; `names` lacks only the helpers that the executor provides (`window`, `restride`, `fail`)."""
    return _Writer(program, kernels).write()


@dataclass
class _Writer:
    program: Program
    kernels: Sequence[LoadedKernel]
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    has_tensor: dict[str, torch.dtype] = field(default_factory=dict)  # names with a tensor variable, its real dtype
    has_address: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)  # the variables' names
    globals_of: dict[int, str] = field(default_factory=dict)  # by identity; `names` keeps the objects alive
    devices: dict[str, torch.device] = field(default_factory=dict)
    tables: list[DeviceTables] = field(default_factory=list)
    streams: dict[str, str] = field(default_factory=dict)

    def write(self) -> RunCode:
        program = self.program
        self.wants_tensor, self.wants_address = _needs(program, self.kernels)
        self.made_by = {name: step for step in program.steps for name in names_made(step)}
        self.taken.update(name for name, _ in program.sizes)
        self.variables.update((name, name) for name in program.symbols)
        self.taken.update(program.symbols)
        for name in (*(name for name, _ in program.inputs + program.scalars), *self.made_by):
            self.variable(name)  # all of them before the first global name is chosen
        self.in_place = self._in_place_donations()
        self.kept_inputs = {program.inputs[position][0] for _, position in program.donations}
        self._inputs()
        for step in program.steps:
            self._step(step)
        self._outputs()
        body = [f"{name} = raw_stream({device.split(':')[1]})" for device, name in self.streams.items()]
        if self.streams:
            self.names["raw_stream"] = torch._C._cuda_getCurrentRawStream
        text = "\n".join(["def run(inputs, scalars):", *(f"    {line}" for line in body + self.lines)]) + "\n"
        return RunCode(text, self.names, self.tables)

    # ---- names

    def variable(self, name: str) -> str:
        """The Python variable of a value or scalar."""
        if name not in self.variables:
            text = re.sub(r"\W", "_", name)
            if not text or text[0].isdigit() or keyword.iskeyword(text) or text in _TAKEN or text.endswith("_p"):
                text = f"value_{text}"
            while text in self.taken:
                text += "_"
            self.taken.add(text)
            self.variables[name] = text
        return self.variables[name]

    def address(self, name: str) -> str:
        """The variable with the address of `name`, computed at its first use."""
        variable = f"{self.variable(name)}_p"
        if name not in self.has_address:
            if name not in self.has_tensor:
                raise ProgramError(f"launch: nothing made {name!r} before it is read; see program_text.format_program")
            self.lines.append(f"{variable} = {self.variable(name)}.data_ptr()")
            self.has_address.add(name)
        return variable

    def constant(self, wish: str, value: Any) -> str:
        """A global name for an object that has no literal; the same name for the same object."""
        if id(value) not in self.globals_of:
            name, number = wish, 0
            while name in self.names or name in self.taken:
                number += 1
                name = f"{wish}_{number}"
            self.names[name] = value
            self.globals_of[id(value)] = name
        return self.globals_of[id(value)]

    def dtype(self, dtype: torch.dtype) -> str:
        return self.constant(str(dtype).removeprefix("torch."), dtype)

    def device(self, device: str) -> str:
        if device not in self.devices:
            self.devices[device] = torch.device(device)
        return self.constant("on_" + device.replace(":", "_"), self.devices[device])

    # ---- inputs and outputs

    def _inputs(self) -> None:
        for names, place in ((self.program.inputs, "inputs"), (self.program.scalars, "scalars")):
            if names:
                self.lines.append(f"({', '.join(self.variable(name) for name, _ in names)},) = {place}")
        self.lines += size_lines(self.program)
        if self.program.inputs:
            self.lines.append("inputs.clear()")
        for name, meta in self.program.inputs:
            self.metas[name] = meta
            self.has_tensor[name] = meta.dtype

    def _in_place_donations(self) -> dict[str, str]:
        """Outputs that are windows on the input that they overwrite, by name of the output."""
        found = {}
        for output, position in self.program.donations:
            name = self.program.outputs[output]
            root = name
            while isinstance(step := self.made_by.get(root), Reinterpret):
                root = step.source
            if root == self.program.inputs[position][0]:
                found[name] = root
        return found

    def _outputs(self) -> None:
        results = [self.variable(name) for name in self.program.outputs]
        for output, position in self.program.donations:
            name, meta = self.program.outputs[output], self.program.output_metas[output]
            given, given_meta = self.program.inputs[position]
            if name in self.in_place:
                continue
            # Whoever made this output could not write into the donated memory: it moves there now.
            target = self.variable(given)
            if (meta.shape, meta.strides, meta.dtype) != (given_meta.shape, given_meta.strides, given_meta.dtype):
                target = f"window({target}, {_tuple(meta.shape)}, {_tuple(meta.strides)}, {self.dtype(meta.dtype)}, 0)"
            self.lines.append(f"{self.variable(name)} = {target}.copy_({self.variable(name)})")
        for name in self.program.outputs:
            if name not in self.has_tensor:
                raise ProgramError(f"output {name!r} is made by no step, or freed; see program_text.format_program")
        self.lines.append(f"return [{', '.join(results)}]")

    # ---- steps

    def _step(self, step: Step) -> None:
        if isinstance(step, Allocate):
            self._allocate(step)
        elif isinstance(step, Reinterpret):
            self._reinterpret(step)
        elif isinstance(step, Launch):
            self._launch(step)
        elif isinstance(step, ForeachLaunch):
            self._foreach(step)
        elif isinstance(step, ExternCall):
            self._extern(step)
        elif isinstance(step, Free):
            self._free(step)
        else:
            assert_never(step)

    def _allocate(self, step: Allocate) -> None:
        name, meta, variable = step.name, step.meta, self.variable(step.name)
        self.metas[name] = meta
        if step.reuse is None:
            empty = self.constant("empty_strided", torch.empty_strided)
            self.lines.append(
                f"{variable} = {empty}({_tuple(meta.shape)}, {_tuple(meta.strides)}, "
                f"dtype={self.dtype(meta.dtype)}, device={self.device(meta.device)})"
            )
            self.has_tensor[name] = meta.dtype
            return
        donor = step.reuse
        if donor not in self.has_tensor:
            raise ProgramError(f"{name} takes over {donor!r}, which has no memory of its own or was freed before")
        if name in self.wants_address and donor in self.has_address:
            self.lines.append(f"{variable}_p = {self.variable(donor)}_p")
            self.has_address.add(name)
        if name in self.wants_tensor:
            self._window(name, donor, meta, 0)
        else:
            self.lines.append(f"{variable} = {self.variable(donor)}")
            self.has_tensor[name] = self.has_tensor[donor]
        self._forget([donor])

    def _reinterpret(self, step: Reinterpret) -> None:
        name, source, meta = step.name, step.source, step.meta
        self.metas[name] = meta
        if source not in self.has_tensor and source not in self.has_address:
            raise ProgramError(f"{name} is a window on {source!r}, which is made by no earlier step, or freed")
        if name in self.in_place and self._is_whole(step):
            self.lines.append(f"{self.variable(name)} = {self.variable(source)}")
            self.has_tensor[name] = self.has_tensor[source]
        elif name in self.wants_tensor:
            self._window(name, source, meta, step.offset)
        if name in self.wants_address and name not in self.has_tensor:
            base = self.address(source)
            is_name = type(step.offset) is SizeName
            offset = f"{step.offset} * {meta.dtype.itemsize}" if is_name else step.offset * meta.dtype.itemsize
            self.lines.append(f"{self.variable(name)}_p = {base}" + (f" + {offset}" if offset else ""))
            self.has_address.add(name)

    def _is_whole(self, step: Reinterpret) -> bool:
        """The window is its source: same layout, no offset, and the source's tensor was not made for other contents."""
        meta, source = step.meta, self.metas[step.source]
        same = (meta.shape, meta.strides, meta.dtype) == (source.shape, source.strides, source.dtype)
        return same and step.offset == 0 and step.source in self.has_tensor

    def _window(self, name: str, source: str, meta: TensorMeta, offset: int) -> None:
        shape, strides, variable = _tuple(meta.shape), _tuple(meta.strides), self.variable(name)
        tensor = self.variable(source)
        if self.has_tensor.get(source) == meta.dtype:  # what `window` would do, without the call
            start = f"{tensor}.storage_offset()" + (f" + {offset}" if offset else "")
            self.lines.append(f"{variable} = {tensor}.as_strided({shape}, {strides}, {start})")
        else:
            self.lines.append(f"{variable} = window({tensor}, {shape}, {strides}, {self.dtype(meta.dtype)}, {offset})")
        self.has_tensor[name] = meta.dtype

    def _launch(self, step: Launch) -> None:
        source = self.kernels[step.kernel].source
        if len(step.buffers) != len(source.pointers) or len(step.sizes) != source.sizes:
            raise ProgramError(
                f"launch of kernel {step.kernel}: {len(step.buffers)} buffers and {len(step.sizes)} sizes for "
                f"{len(source.pointers)} pointers and {source.sizes} sizes"
            )
        if step.sizes and step.sizes[0] == 0:
            return
        memory = self.variable if self.kernels[step.kernel].takes_tensors else self.address
        arguments = [*map(memory, step.buffers), *map(self.variable, step.scalars)]
        self._call(step.kernel, step.buffers, step.sizes, arguments)

    def _foreach(self, step: ForeachLaunch) -> None:
        kernel = self.kernels[step.kernel]
        rows = [row for row in step.rows if not (row[1] and row[1][0] == 0)]
        if not rows:
            return
        values: list[str] = []
        for buffers, sizes, scalars in rows:
            values += [self.address(name) for name in buffers]
            values += [str(size) for size in sizes]
            values += [self.variable(name) for name in scalars]
        table = f"{self.constant('pack', pack_rows(kernel.source, len(rows)))}({', '.join(values)})"
        buffers = rows[0][0]
        if kernel.takes_tensors:
            table = f"{self.constant('table_tensor', table_tensor)}({table})"
        elif kernel.takes_stream:
            device = self.metas[buffers[0]].device
            self.tables.append(DeviceTables(device, len(rows) * words_of_row(kernel.source)))
            address = self.constant("table_address", self.tables[-1].address)
            table = f"{address}({self._stream(device)}, {table})"
        arguments = [table, *map(self.variable, step.scalars)]
        if kernel.triton is None:
            arguments.insert(1, str(len(rows)))
        self._call(step.kernel, buffers, tuple(row[1][0] for row in rows if row[1]), arguments)

    def _call(self, number: int, buffers: Sequence[str], sizes: tuple[int, ...], arguments: list[str]) -> None:
        kernel = self.kernels[number]
        device = self.metas[buffers[0]].device if buffers else "cpu"
        if kernel.triton is not None:
            function = kernel.triton.bind(device, sizes)
            if kernel.source.dynamic:
                arguments = [*arguments, *map(str, sizes)]
        else:
            assert kernel.function is not None
            function = kernel.function
            if not kernel.source.foreach:
                arguments = [*arguments, *map(str, sizes)]
        if kernel.takes_stream:
            arguments = [self._stream(device), *arguments]
        call = f"{self.constant(f'kernel{number}', function)}({', '.join(arguments)})"
        if kernel.source.index_checks and kernel.source.language != "triton":
            self.lines += [f"status = {call}", f"if status: fail({number}, status)"]
        else:
            self.lines.append(call)

    def _stream(self, device: str) -> str:
        if device not in self.streams:
            if self.streams:
                raise ProgramError(f"one program on two CUDA devices ({device}, {next(iter(self.streams))}); split it")
            self.streams[device] = f"stream_{device.replace(':', '_')}"
        return self.streams[device]

    def _extern(self, step: ExternCall) -> None:
        overload = resolve_overload(step.op)
        function = self.constant("aten_" + step.op.split(".")[1], overload)
        arguments = [self._argument(value) for value in step.args]
        arguments += [f"{name}={self._argument(value)}" for name, value in step.kwargs]
        call = f"{function}({', '.join(arguments)})"
        if not returns_many(overload):
            name = step.outputs[0] if step.outputs else None
            self.lines.append(f"{self.variable(name)} = {call}" if name else call)
        else:
            self.lines.append(f"results = {call}")
            for number, name in enumerate(step.outputs):
                if name:
                    self.lines.append(f"{self.variable(name)} = results[{number}]")
            self.lines.append("results = None")
        for name, meta in zip(step.outputs, step.metas, strict=True):
            if name and meta:
                self.metas[name] = meta
                self.has_tensor[name] = meta.dtype
                strides, variable = _tuple(meta.strides), self.variable(name)
                self.lines.append(
                    f"if {variable}.stride() != {strides}: "
                    f"{variable} = restride({variable}, {_tuple(meta.shape)}, {strides})"
                )

    def _argument(self, value: Any) -> str:
        if isinstance(value, ValueRef):
            if not value.scalar and value.name not in self.has_tensor:
                raise ProgramError(f"extern call reads {value.name!r}, which is made by no earlier step, or freed")
            return self.variable(value.name)
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._argument(item) for item in value)}]"
        if isinstance(value, torch.dtype):
            return self.dtype(value)
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self.constant("constant", value)

    def _free(self, step: Free) -> None:
        last = set(self.program.outputs) | self.kept_inputs
        self._forget([name for name in step.names if name not in last])

    def _forget(self, names: Sequence[str]) -> None:
        gone = [name for name in names if name in self.has_tensor]
        if gone:
            self.lines.append("del " + ", ".join(self.variable(name) for name in gone))
        for name in names:
            self.has_tensor.pop(name, None)
            self.has_address.discard(name)


# What generated functions use as names beside values.
_TAKEN = frozenset({
    "inputs", "scalars", "run", "status", "results", "window", "restride", "fail", "raw_stream",
})  # fmt: skip


def _needs(program: Program, kernels: Sequence[LoadedKernel]) -> tuple[set[str], set[str]]:
    """Names that must be tensors, names whose address is used."""
    tensors = set(program.outputs)
    addresses: set[str] = set()
    for step in reversed(program.steps):
        if isinstance(step, Launch):
            (tensors if kernels[step.kernel].takes_tensors else addresses).update(step.buffers)
        elif isinstance(step, ForeachLaunch):
            for buffers, _, _ in step.rows:
                addresses.update(buffers)
                if kernels[step.kernel].takes_tensors:
                    tensors.update(buffers)
        elif isinstance(step, ExternCall):
            tensors.update(names_read(step))
        elif isinstance(step, Reinterpret):
            if step.name in tensors:
                tensors.add(step.source)
            if step.name in addresses:
                addresses.add(step.source)
    return tensors, addresses


def _tuple(values: Sequence[Any]) -> str:
    """A tuple literal of ints."""
    return "(" + ", ".join(str(value) for value in values) + ("," if len(values) == 1 else "") + ")"
