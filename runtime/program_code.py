"""A program as one flat Python function: what runs at every step is straight-line code over local variables.

Invariant: each step becomes a line or a few; nothing is looked up, counted or decided at run time that the program
fixes. A name has a tensor variable where an ATen call, an output or a window needs one, and an address variable (`_p`)
where a kernel does; windows and reused memory that only kernels touch are arithmetic on addresses.

Parts of a program that are equal but for their names share one function (`program_parts`, `part_code`): that of a model
of many equal layers is then hardly longer than that of one of few.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.foreach_launch import DeviceTables, pack_rows, table_tensor, words_of_row
from torchlazy.runtime.name_needs import needs, read_as_tensors
from torchlazy.runtime.part_code import PartCode, place_variable
from torchlazy.runtime.program import (
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
from torchlazy.runtime.program_parts import Part, find_parts
from torchlazy.runtime.small_values import place_small_values
from torchlazy.runtime.steps import names_made, quickest_call, resolve_overload, returns_many, without_defaults
from torchlazy.runtime.symbolic import SizeName, size_lines
from torchlazy.runtime.toolchain import LoadedKernel
from torchlazy.runtime.windows_spared import without_spare_windows
from typing_extensions import assert_never


@dataclass
class RunCode:
    """The text of `run(inputs, scalars)`, the names that it takes from its globals, and its foreach tables.

    `steps` are the program's, without spare ones. `parts` are functions that are defaults of `run`'s. `begun` has for
    each line of the text how many steps have begun when it is done; in a part's function, how many of that part's.
    `calls` are the lines that call parts, with the steps that have begun before."""

    text: str
    names: dict[str, Any]
    tables: list[DeviceTables]
    steps: tuple[Step, ...]
    parts: list[str]
    begun: list[int]
    calls: dict[int, int]


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
    begun: list[int] = field(default_factory=list)  # as in `RunCode`, of the lines so far
    calls: dict[int, int] = field(default_factory=dict)
    parts: dict[Hashable, PartCode] = field(default_factory=dict)
    part_lines: list[str] = field(default_factory=list)
    part_begun: list[int] = field(default_factory=list)

    def write(self) -> RunCode:
        program = self.program = without_spare_windows(self.program, read_as_tensors(self.program, self.kernels))
        self.wants_tensor, self.wants_address, self.last_address = needs(program, self.kernels)
        self.small = place_small_values(program, self.wants_tensor)
        self.taken.update(f"{_piece(device)}{end}" for device in self.small.pieces for end in ("", "_next"))
        self.made_by = {name: step for step in program.steps for name in names_made(step)}
        self.taken.update(name for name, _ in program.sizes)
        self.variables.update((name, name) for name in program.symbols)
        self.taken.update(program.symbols)
        for name in (*(name for name, _ in program.inputs + program.scalars), *self.made_by):
            self.variable(name)  # all of them before the first global name is chosen
        self.in_place = self._in_place_donations()
        self.kept_inputs = {program.inputs[position][0] for _, position in program.donations}
        self.lasting = self.kept_inputs | set(program.outputs)
        self._inputs()
        self._mark(0)
        position = 0
        for part in find_parts(program):
            self._steps(position, part.start)
            self._part(part)
            position = part.stop
        self._steps(position, len(program.steps))
        self._outputs()
        self._mark(len(program.steps))
        return self._finish()

    def _steps(self, start: int, stop: int) -> None:
        for position in range(start, stop):
            self._step(self.program.steps[position])
            self._mark(position + 1)

    def _mark(self, steps: int) -> None:
        """The lines since the last mark are done when so many steps have begun."""
        self.begun += [steps] * (len(self.lines) - len(self.begun))

    def _finish(self) -> RunCode:
        """The parts' functions, then `run`. As globals the parts would be a cycle, for their globals are the same."""
        head = [f"{name} = raw_stream({device.split(':')[1]})" for device, name in self.streams.items()]
        head += self._small_values_lines()
        if self.streams:
            self.names["raw_stream"] = torch._C._cuda_getCurrentRawStream
        parts = [part.name for part in self.parts.values() if part.name]
        before = [*self.part_lines, f"def run({', '.join(['inputs', 'scalars', *(f'{p}={p}' for p in parts)])}):"]
        text = "\n".join([*before, *(f"    {line}" for line in head + self.lines)]) + "\n"
        first = len(before) + len(head)
        begun = [*self.part_begun, *[0] * (first - len(self.part_begun)), *self.begun]
        calls = {first + line: steps for line, steps in self.calls.items()}
        return RunCode(text, self.names, self.tables, self.program.steps, parts, begun, calls)

    # ---- parts

    def _part(self, part: Part) -> None:
        """A call of the part's function, which is written for the first part of its kind.

        Whatever else is known of names outside, and changes what a step's lines are, belongs into `_state`."""
        exact = not part.made.isdisjoint(self.in_place)
        variables = [self.variable(name) for name in part.names]
        shared = tuple(map(variables.index, variables)) if len(set(variables)) < len(variables) else ()
        kind = (part.key, tuple([self._state(name, part, exact) for name in part.names]), shared)
        code = self.parts.get(kind)
        if code is None:
            code = self.parts[kind] = self._write_part(part)
        for number, name in enumerate(part.names):
            if (meta := code.metas[number]) is not None:
                self.metas[name] = meta
            if (dtype := code.dtypes[number]) is not None:
                self.has_tensor[name] = dtype
            else:
                self.has_tensor.pop(name, None)
                (self.has_address.add if code.addresses[number] else self.has_address.discard)(name)
        for number, of in code.same:
            self.variables[part.names[number]] = self.variable(part.names[of])
        if code.name:
            before = len(self.lines)
            self.lines += code.call_lines([self.variable(name) for name in part.names])
            self.calls |= dict.fromkeys(range(before, len(self.lines)), part.start)
        self._mark(part.stop)

    def _state(self, name: str, part: Part, exact: bool) -> Hashable:
        """What the code of a part depends on beside its steps; with `exact` also on layouts of what it reads."""
        lasting = name in self.lasting
        if name in part.made:
            wants_tensor = name in self.wants_tensor
            is_small = name in self.small.names
            address_later = not wants_tensor and self.last_address.get(name, -1) >= part.stop
            return wants_tensor, name in self.wants_address, address_later, name in self.in_place, is_small, lasting
        dtype, meta = self.has_tensor.get(name), self.metas.get(name)
        has_address = dtype is None and name in self.has_address
        # Not on its layout: that of memory that is taken over often changes from layer to layer.
        return dtype, has_address, lasting, meta if exact else meta and meta.device

    def _write_part(self, part: Part) -> PartCode:
        """The function of a part whose names are as they are now; they are afterwards as the part leaves them.

        Addresses of tensors are asked for again inside, and after it: that is cheap, and parts stay alike."""
        names = part.names
        tensors = [name in self.has_tensor for name in names]
        addresses = [name in self.has_address and name not in self.has_tensor for name in names]
        known = self.has_address & self.has_tensor.keys()
        self.has_address -= known
        outer, self.lines, self.begun = (self.lines, self.begun), [], []
        for number, step in enumerate(self.program.steps[part.start : part.stop], 1):
            self._step(step)
            self._mark(number)
        (self.lines, self.begun), body, begun = outer, self.lines, self.begun
        for name, had in zip(names, addresses, strict=True):
            if not had and (name in self.has_tensor or self.last_address.get(name, -1) < part.stop):
                self.has_address.discard(name)
        self.has_address |= known & self.has_tensor.keys()
        variables = [self.variable(name) for name in names]
        made = [n for n, name in enumerate(names) if name in part.made]
        stays = {variables[n]: n for n, had in enumerate(tensors) if had and names[n] in self.has_tensor}
        same = {n: stays[variables[n]] for n in made if variables[n] in stays}
        gives = [(n, False) for n in made if names[n] in self.has_tensor and n not in same]
        gives += [(n, True) for n in made if names[n] in self.has_address and n not in same]
        used = set(re.findall(r"\w+", "\n".join(body)))
        takes = [(n, False) for n, had in enumerate(tensors) if had and names[n] in self.has_tensor]
        takes += [(n, False) for n, name in enumerate(names) if name in part.scalars]
        takes += [(n, True) for n, had in enumerate(addresses) if had]
        code = PartCode(
            name=self._part_name() if body else "",
            given=tuple(n for n, had in enumerate(tensors) if had and names[n] not in self.has_tensor),
            takes=tuple({v: place for place in takes if (v := place_variable(variables, place)) in used}.values()),
            gives=tuple(gives),
            same=tuple(same.items()),
            outer=tuple(name for name in self._outer_variables() if name in used),
            dtypes=tuple(self.has_tensor.get(name) for name in names),
            addresses=tuple(name in self.has_address for name in names),
            metas=tuple(self.metas[name] if name in part.made else None for name in names),
        )
        if body:
            lines = code.function_lines(variables, body)
            self.part_lines += lines
            self.part_begun += [*[0] * (len(lines) - len(body) - 1), *begun, part.stop - part.start]
        return code

    def _outer_variables(self) -> list[str]:
        """Variables of `run` beside values."""
        return [*self.streams.values(), *(f"{_piece(device)}_next" for device in self.small.pieces)]

    def _part_name(self) -> str:
        name = f"part{len(self.parts)}"
        while name in self.taken or name in self.names:
            name += "_"
        self.taken.add(name)
        return name

    def _small_values_lines(self) -> list[str]:
        """Memory for the small values, and what gives their addresses one after the other."""
        lines = []
        for device, (size, offsets) in self.small.pieces.items():
            piece, uint8 = _piece(device), self.dtype(torch.uint8)
            empty = self.constant("empty_strided", torch.empty_strided)
            places = self.constant(f"{piece}_places", offsets)
            lines += [
                f"{piece} = {empty}(({size},), (1,), dtype={uint8}, device={self.device(device)})",
                f"{piece}_next = map({piece}.data_ptr().__add__, {places}).__next__",
            ]
        return lines

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
        if name in self.small.names:
            if step.reuse:
                self.variables[name] = self.variable(step.reuse)
                self.has_address.discard(step.reuse)
            else:
                self.lines.append(f"{variable}_p = {_piece(meta.device)}_next()")
            self.has_address.add(name)
            return
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
            raise ProgramError(f"{name} is a window on {source!r}, which is made by no earlier step, or freed")
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
        tensor, text = self.variable(source), f"{_tuple(meta.shape)}, {_tuple(meta.strides)}"
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


def _piece(device: str) -> str:
    """The variable with the memory of small values on this device."""
    return f"small_values_{re.sub(r'[^a-z0-9]', '_', device)}"


def _tuple(values: Sequence[Any]) -> str:
    """A tuple literal of ints."""
    return "(" + ", ".join(str(value) for value in values) + ("," if len(values) == 1 else "") + ")"
