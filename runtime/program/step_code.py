"""The lines of a program's steps: what each becomes in the function that `program_code` writes.

Invariant: a name has a tensor variable where an ATen call, an output or a window needs one, and an address variable
(`_p`) where a kernel does; windows and reused memory that only kernels touch are arithmetic on addresses.
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
from torchlazy.runtime.cuda.foreach_launch import DeviceTables, pack_rows, table_tensor, words_of_row
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    ForeachRow,
    Free,
    KernelSource,
    Launch,
    Program,
    Reinterpret,
    Step,
    ValueRef,
)
from torchlazy.runtime.program.small_values import SmallValues
from torchlazy.runtime.program.steps import quickest_call, resolve_overload, returns_many, without_defaults
from torchlazy.runtime.program.symbolic import SizeName
from torchlazy.runtime.toolchains.toolchain import LoadedKernel
from typing_extensions import assert_never


@dataclass
class StepCode:
    """Lines so far, and what is known of names after them."""

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
    # Known before the first step is written.
    wants_tensor: set[str] = field(init=False)
    wants_address: set[str] = field(init=False)
    last_address: dict[str, int] = field(init=False)
    small: SmallValues = field(init=False)
    in_place: dict[str, str] = field(init=False)
    lasting: set[str] = field(init=False)  # names that are not forgotten when they are freed

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

    # ---- steps

    def step(self, step: Step) -> None:
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
        if name in self.small.names:
            if step.reuse:
                self.variables[name] = self.variable(step.reuse)
                self.has_address.discard(step.reuse)
            else:
                self.lines.append(f"{variable}_p = {piece_variable(meta.device)}_next()")
            self.has_address.add(name)
            return
        if step.reuse is None:
            empty = self.constant("empty_strided", torch.empty_strided)
            self.lines.append(
                f"{variable} = {empty}({tuple_text(meta.shape)}, {tuple_text(meta.strides)}, "
                f"dtype={self.dtype(meta.dtype)}, device={self.device(meta.device)})"
            )
            self.has_tensor[name] = meta.dtype
            return
        donor = step.reuse
        if donor not in self.has_tensor:
            raise ProgramError(f"{name} takes over {donor!r}, which has no memory of its own or was freed before")
        if name not in self.wants_tensor:  # the donor's variables go on under another name
            self._same_tensor(name, donor)
            del self.has_tensor[donor]
            self.has_address.discard(donor)
            return
        if name in self.wants_address and donor in self.has_address:
            self.lines.append(f"{variable}_p = {self.variable(donor)}_p")
            self.has_address.add(name)
        self._window(name, donor, meta, 0)
        self._forget([donor])

    def _reinterpret(self, step: Reinterpret) -> None:
        name, source, meta = step.name, step.source, step.meta
        self.metas[name] = meta
        if source not in self.has_tensor and source not in self.has_address:
            raise ProgramError(f"{name} is a view of {source!r}, which is made by no earlier step, or freed")
        if name in self.in_place and self._is_whole(step):  # neither is forgotten
            self._same_tensor(name, source)
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

    def _same_tensor(self, name: str, source: str) -> None:
        """One tensor under two names, and in one variable."""
        self.variables[name] = self.variable(source)
        self.has_tensor[name] = self.has_tensor[source]
        if source in self.has_address:
            self.has_address.add(name)

    def _window(self, name: str, source: str, meta: TensorMeta, offset: int) -> None:
        tensor, text = self.variable(source), f"{tuple_text(meta.shape)}, {tuple_text(meta.strides)}"
        if self.has_tensor.get(source) == meta.dtype:  # what `window` would do, without the call
            if type(offset) is SizeName or offset:
                text += f", {tensor}.storage_offset() + {offset}"
            self.lines.append(f"{self.variable(name)} = {tensor}.as_strided({text})")
        else:
            self.lines.append(f"{self.variable(name)} = window({tensor}, {text}, {self.dtype(meta.dtype)}, {offset})")
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
        pack = self.constant("pack", pack_rows(kernel.source, len(rows)))
        if len(rows) < _MANY_ROWS or any(type(size) is not int for _, sizes, _ in rows for size in sizes):
            values: list[str] = []
            for buffers, sizes, scalars in rows:
                values += [self.address(name) for name in buffers]
                values += [str(size) for size in sizes]
                values += [self.variable(name) for name in scalars]
            table = f"{pack}({', '.join(values)})"
        else:
            self._columns(kernel.source, rows)
            table = f"{pack}(*words)"
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

    def _columns(self, source: KernelSource, rows: Sequence[ForeachRow]) -> None:
        """The words of a table of many rows as a list, made column by column: addresses are asked for by one `map`."""
        width = words_of_row(source)
        blank: list[float] = []
        for buffers, sizes, scalars in rows:
            blank += [*[0] * len(buffers), *sizes, *[0] * len(scalars)]
        self.lines.append(f"words = {self.constant('blank', blank)}.copy()")
        first = len(source.pointers) + source.sizes
        for number in range(len(source.pointers)):
            names = [buffers[number] for buffers, _, _ in rows]
            if all(name in self.has_tensor for name in names):
                tensors = ", ".join(map(self.variable, names))
                addresses = f"map({self.constant('data_ptr', torch.Tensor.data_ptr)}, ({tensors}))"
            else:
                addresses = f"({', '.join(map(self.address, names))})"
            self.lines.append(f"words[{number}::{width}] = {addresses}")
        for number in range(len(source.row_scalars)):
            values = ", ".join(self.variable(scalars[number]) for _, _, scalars in rows)
            self.lines.append(f"words[{first + number}::{width}] = ({values})")

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
        function = self.constant("aten_" + step.op.split(".")[1], quickest_call(step.op))
        arguments = [self._argument(value) for value in step.args]
        arguments += [f"{name}={self._argument(value)}" for name, value in without_defaults(overload, step.kwargs)]
        call = f"{function}({', '.join(arguments)})"
        if not returns_many(overload):
            name = step.outputs[0] if step.outputs else None
            self.lines.append(f"{self.variable(name)} = {call}" if name else call)
        else:
            self.lines.append(f"results = {call}")
            for number, name in enumerate(step.outputs):
                if name and self._is_read(name):
                    self.lines.append(f"{self.variable(name)} = results[{number}]")
            self.lines.append("results = None")
        # One of several results may be None: a statistic that nobody asked for, a mask that is off.
        absent = "{0} is None or " if returns_many(overload) else ""
        for name, meta in zip(step.outputs, step.metas, strict=True):
            if name and meta and (self._is_read(name) or not absent):
                self.metas[name] = meta
                self.has_tensor[name] = meta.dtype
                strides, variable = tuple_text(meta.strides), self.variable(name)
                self.lines.append(
                    f"if {absent.format(variable)}{variable}.stride() != {strides}: "
                    f"{variable} = restride({variable}, {tuple_text(meta.shape)}, {strides})"
                )

    def _is_read(self, name: str) -> bool:
        return name in self.wants_tensor or name in self.wants_address

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
        self._forget([name for name in step.names if name not in self.lasting])

    def _forget(self, names: Sequence[str]) -> None:
        gone = [name for name in names if name in self.has_tensor]
        if gone:
            self.lines.append("del " + ", ".join(self.variable(name) for name in gone))
        for name in names:
            self.has_tensor.pop(name, None)
            self.has_address.discard(name)


_MANY_ROWS = 16  # of a table that is made column by column; a short one is made at once

# What generated functions use as names beside values.
_TAKEN = frozenset({
    "inputs", "scalars", "run", "status", "results", "window", "restride", "fail", "raw_stream", "given", "words",
    "map",
})  # fmt: skip


def piece_variable(device: str) -> str:
    """The variable with the memory of small values on this device."""
    return f"small_values_{re.sub(r'[^a-z0-9]', '_', device)}"


def tuple_text(values: Sequence[Any]) -> str:
    """A tuple literal of ints."""
    return "(" + ", ".join(str(value) for value in values) + ("," if len(values) == 1 else "") + ")"
