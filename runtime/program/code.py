"""A program as one flat Python function: what runs at every step is straight-line code over local variables.

Invariant: each step becomes a line or a few; nothing is looked up, counted or decided at run time that the program
fixes. `step_code` writes the lines of each step.

Parts of a program that are equal but for their names share one function (`program_parts`, `part_code`): that of a model
of many equal layers is then hardly longer than that of one of few.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.runtime.cuda.foreach_launch import DeviceTables
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.program.name_needs import needs, read_as_tensors
from torchlazy.runtime.program.part_code import PartCode, place_variable
from torchlazy.runtime.program.parts import ProgramPart, find_parts
from torchlazy.runtime.program.program import Program, Reinterpret, Step
from torchlazy.runtime.program.small_values import place_small_values
from torchlazy.runtime.program.spared_views import without_spare_windows
from torchlazy.runtime.program.stages import Border
from torchlazy.runtime.program.step_code import StepCode, piece_variable, tuple_text
from torchlazy.runtime.program.steps import names_made
from torchlazy.runtime.program.symbolic import size_lines
from torchlazy.runtime.toolchains.toolchain import LoadedKernel


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


def emit_run(
    program: Program, kernels: Sequence[LoadedKernel], stops: Sequence[int] = (), border: Border | None = None
) -> RunCode:
    """Write the function; `names` lacks only the helpers that the executor provides (`window`, `restride`, `fail`).
    It calls `border` before the steps at `stops`."""
    return _CodeWriter(program, kernels, stops=frozenset(stops), border=border).write()


@dataclass
class _CodeWriter(StepCode):
    stops: frozenset[int] = frozenset()
    border: Border | None = None
    begun: list[int] = field(default_factory=list)  # as in `RunCode`, of the lines so far
    calls: dict[int, int] = field(default_factory=dict)
    parts: dict[Hashable, PartCode] = field(default_factory=dict)
    part_lines: list[str] = field(default_factory=list)
    part_begun: list[int] = field(default_factory=list)

    def write(self) -> RunCode:
        program = self.program = without_spare_windows(self.program, read_as_tensors(self.program, self.kernels))
        self.wants_tensor, self.wants_address, self.last_address = needs(program, self.kernels)
        self.small = place_small_values(program, self.wants_tensor)
        self.taken.update(f"{piece_variable(device)}{end}" for device in self.small.pieces for end in ("", "_next"))
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
        for part in [] if self.stops else find_parts(program):
            self._steps(position, part.start)
            self._part(part)
            position = part.stop
        self._steps(position, len(program.steps))
        self._outputs()
        self._mark(len(program.steps))
        return self._finish()

    def _steps(self, start: int, stop: int) -> None:
        for position in range(start, stop):
            if position in self.stops:
                self.lines.append(f"{self.constant('border', self.border)}()")
            self.step(self.program.steps[position])
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

    def _part(self, part: ProgramPart) -> None:
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

    def _state(self, name: str, part: ProgramPart, exact: bool) -> Hashable:
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

    def _write_part(self, part: ProgramPart) -> PartCode:
        """The function of a part whose names are as they are now; they are afterwards as the part leaves them.

        Addresses of tensors are asked for again inside, and after it: that is cheap, and parts stay alike."""
        names = part.names
        tensors = [name in self.has_tensor for name in names]
        addresses = [name in self.has_address and name not in self.has_tensor for name in names]
        known = self.has_address & self.has_tensor.keys()
        self.has_address -= known
        outer, self.lines, self.begun = (self.lines, self.begun), [], []
        for number, step in enumerate(self.program.steps[part.start : part.stop], 1):
            self.step(step)
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
        return [*self.streams.values(), *(f"{piece_variable(device)}_next" for device in self.small.pieces)]

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
            piece, uint8 = piece_variable(device), self.dtype(torch.uint8)
            empty = self.constant("empty_strided", torch.empty_strided)
            places = self.constant(f"{piece}_places", offsets)
            lines += [
                f"{piece} = {empty}(({size},), (1,), dtype={uint8}, device={self.device(device)})",
                f"{piece}_next = map({piece}.data_ptr().__add__, {places}).__next__",
            ]
        return lines

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
                shape, strides = tuple_text(meta.shape), tuple_text(meta.strides)
                target = f"window({target}, {shape}, {strides}, {self.dtype(meta.dtype)}, 0)"
            self.lines.append(f"{self.variable(name)} = {target}.copy_({self.variable(name)})")
        for name in self.program.outputs:
            if name not in self.has_tensor:
                raise ProgramError(f"output {name!r} is made by no step, or freed; see program_text.format_program")
        self.lines.append(f"return [{', '.join(results)}]")
