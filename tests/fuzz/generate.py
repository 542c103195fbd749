"""Draws a program: lines and blocks of control flow, each tried eagerly as it is drawn, so that most of them run.

Invariant: a seed is always the same program. Lines are those of tests/lazy/random_programs.py and of `templates`; a
`$name` in them is filled in as there.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz import templates
from tests.fuzz.program import PACKINGS, Program
from tests.fuzz.world import MEMORY, MEMORY_OF_LEAVES, NAMES, Call, Inputs, World, arguments
from tests.lazy.random_programs import CHANGES, DTYPES, LINES, SHAPES, Drawing

_LARGEST = 3000  # elements of a tensor
_TRIES = 5  # for each line that is wanted
_RAISES = 0.1  # of the programs raise at their end, in some calls
_AGAIN = 0.7  # how often a topic whose line did not fit gets another one
PLAIN = ("", "rows", "moved", "columns")
_ALIKE = ((1, True), (1, 1.0, True), (0, False), (0, 0.0, False), (2, 2.0))  # equal numbers of other types
_DRAWN_VALUES = ("view", "new", "take", "reduce", "nn")


def _parts(text: str) -> list[str]:
    return [part.strip() for row in text.strip().split("\n") for part in row.split(" | ") if part.strip()]


class Writer(Drawing):
    """One program being drawn; `names` are the tensors at its end so far, as eager has them in the first call."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: dict[str, Any] = {}
        self.count = 0
        draw = self.random
        self.grad = draw.random() < 0.7
        # Little changes from call to call, and all calls run: most of them are replayed.
        self.tame = draw.random() < 0.6
        self.topics = draw.sample(templates.TOPICS, 3) if draw.random() < 0.6 else []
        other = [kind for kind in LINES if kind not in (*_DRAWN_VALUES, "grad", "random", "out" * self.tame)]
        self.kinds = [
            *["value"] * 7, *(other if self.tame else other * 2), *["binary"] * 3, *["grad"] * 4 * self.grad,
            *["random"] * 2 * (draw.random() < 0.2),
        ]  # fmt: skip
        inputs = []
        for _ in range(draw.randint(2, 4)):
            dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
            leaf = self.grad and (dtype.is_floating_point or dtype.is_complex) and draw.random() < 0.4
            inputs.append(
                Inputs(
                    self.new(),
                    dtype,
                    shape,
                    leaf,
                    draw.choice(self.memory(leaf)),
                )
            )
        self.program = Program(seed, tuple(inputs), draw.choice(PACKINGS), "", self.calls())

    def memory(self, leaf: bool) -> tuple[str, ...]:
        """Kinds of memory of which an argument has one."""
        if self.tame and self.random.random() < 0.3:
            return PLAIN
        return MEMORY_OF_LEAVES if leaf else MEMORY

    def calls(self) -> tuple[Call, ...]:
        draw = self.random
        count = draw.randint(6, 8)
        base = (draw.choice([3, 4, 5, 17]), draw.choice([2, 3, 4]))
        odd = (draw.choice([0, 1, 2, 6, 17]), draw.choice([0, 1, 2, 3, 17]))
        match draw.choice((0, 0, 1, 2)) if self.tame else draw.randrange(4):
            case 0:
                sizes = [base] * count
            case 1:
                sizes = [(base[0] + i // 2, base[1]) for i in range(count)]
            case 2:
                sizes = [odd if i in (3, 5) else base for i in range(count)]
            case _:
                sizes = [base, base, (base[0] + 1, base[1]), base, odd, (base[0], base[1] + 1), base, odd][:count]
        vary, busy, after = (
            draw.random() < (0.3 if self.tame else 0.5),
            draw.choice([0.0, 0.1] if self.tame else [0.2, 0.6]),
            draw.choice(["", *templates.AFTER]),
        )
        changes = CHANGES + templates.CHANGES
        numbers = [
            (draw.choice([0.5, 1.5, 2.0, 0.25]), draw.randrange(5), draw.choice([0.5, 1, True, 2])) for _ in sizes
        ]
        numbers = [numbers[i * vary] for i in range(count)]
        if draw.random() < (0.7 if any("k2" in text for texts, _ in self.topics for text in texts) else 0.1):
            alike = draw.choice(_ALIKE)
            numbers = [(k0, k1, draw.choice(alike)) for k0, k1, _ in numbers]
        own = [text for _, texts in self.topics for text in texts]

        def change(number: int) -> str:
            """What the program looks at changes once calls have been captured."""
            if own and number > 2:
                return draw.choice(own) if draw.random() < 0.5 else ""
            return draw.choice(changes) if draw.random() < busy else ""

        return tuple(
            Call(n, m, numbers[i], draw.randrange(1000), change(i), after if draw.random() < 0.8 else "")
            for i, (n, m) in enumerate(sizes)
        )

    def one(self, text: str, filled: dict[str, str]) -> str:
        while "$" in text:
            text = re.sub(r"\$(\w+)", lambda found: self.fill(found[1], filled), text)
        return re.sub(r"\btell\(", "told.append(", text)

    def line(self) -> str:
        """A line, of ours or of the other programs."""
        draw = self.random
        while True:
            if draw.random() < 0.25:
                kind = draw.choice(list(templates.LINES))
                return self.one(draw.choice(_parts(templates.LINES[kind])), {})
            text = self.one(super().line(), {})
            if not text.startswith("while "):  # may have no end
                return text

    def block(self) -> str:
        """Lines of control flow. `$v` is bound before, and inside it the lines of its body keep its shape."""
        draw, filled = self.random, dict[str, str]()
        text = draw.choice([block for block in templates.BLOCKS if not self.tame or "view(7" not in block])
        while "<c>" in text:
            text = text.replace("<c>", draw.choice(templates.CONDITIONS), 1)
        text = self.one(text, filled)
        rows = []
        for row in text.strip("\n").split("\n"):
            if row.strip() == "<body>":
                space = row[: len(row) - len(row.lstrip())]
                for _ in range(draw.randint(1, 3)):
                    inner = dict(filled)
                    rows.append(space + self.one(draw.choice(_parts(templates.INNER)), inner))
            else:
                rows.append(row)
        return "\n".join(rows)

    def piece(self) -> str:
        """The next lines of the step."""
        draw = self.random
        text = self.block() if draw.random() < 0.3 else self.line()
        if draw.random() < 0.06 and not self.tame:
            inner = "\n".join("    " + row for row in text.split("\n"))
            text = f"try:\n{inner}\nexcept Exception as error:\n    told.append(type(error).__name__)"
        elif draw.random() < 0.03 and self.names:
            text = f"if {self.one(draw.choice(templates.CONDITIONS), {})}:\n    return {self.result()}"
        return text

    def result(self) -> str:
        """An expression over what there is."""
        draw = self.random
        names = [name for name, value in self.names.items() if isinstance(value, torch.Tensor)] or ["None"]
        pick = [draw.choice(names) for _ in range(3)]
        return draw.choice([
            "{" + ", ".join(f"'{name}': {name}" for name in names) + ", 'told': told}",
            f"({pick[0]}, {pick[1]}, told)", f"[{pick[0]}, ({pick[1]}, {pick[2]}), told]", f"{pick[0]}",
            f"Box(({pick[0]}, told), k0)", f"Pair({pick[0]}, [{pick[1]}, told])", f"({pick[0]}, S.n, told, None, S.k)",
        ])  # fmt: skip


def _try(writer: Writer, body: list[str], numbers: Sequence[int]) -> dict[str, Any] | None:
    """The names at the end of the body in the first of these calls, which run eagerly, in order; None where it returned
    before. What they raise."""
    program, found = writer.program, list[dict[str, Any]]()
    source = program.opening() + "\n".join(
        "    " + row for text in [*body, "probe(locals())"] for row in text.split("\n")
    )
    step = replace(program, source=source).step()
    step.__globals__["probe"] = found.append
    torch.manual_seed(program.seed)
    S = World("cpu", program.seed, step)
    for number in numbers:
        call = program.calls[number]
        if number:
            exec(call.before, {**NAMES, "S": S, "dev": "cpu"})
        args = arguments(program.inputs, call, "cpu", S)
        step(S, "cpu", *call.numbers, *program.packed([args[item.name] for item in program.inputs]))
        if number == numbers[0] and not found:
            return None
    for name, value in [*found[0].items(), *vars(S).items()]:
        if isinstance(value, torch.Tensor) and value.numel() > _LARGEST:
            raise OverflowError(name)
    return {name: value for name, value in found[0].items() if re.fullmatch(r"v\d+", name)}


def draw_program(seed: int) -> Program:
    """The program of a seed."""
    writer, body = Writer(seed), list[str]()
    draw = writer.random
    length = draw.choice([3, 5, 9] if writer.tame else [5, 9, 14])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer.names = _try(writer, [], [0]) or {}
        topics = [texts for texts, _ in writer.topics]
        for _ in range(length * _TRIES):
            if len(body) == length:
                break
            texts, names = topics.pop() if topics else (), None
            with contextlib.suppress(LookupError, RuntimeError):  # nothing fits; torch refuses to tell of a view
                piece = writer.one(draw.choice(texts), {}) if texts else writer.piece()
                names = _accepted(writer, body, piece)
            if names is not None:
                writer.names = names
                body.append(piece)
            elif texts and draw.random() < _AGAIN:
                topics.insert(0, texts)
        result = writer.result()
        if draw.random() < _RAISES and writer.names:
            body.append(f"if {writer.one(draw.choice(templates.CONDITIONS), {})}:\n    raise ArithmeticError('odd')")
    source = writer.program.opening() + "\n".join("    " + row for text in body for row in text.split("\n"))
    return replace(writer.program, source=f"{source.rstrip()}\n    return {result}\n")


def _accepted(writer: Writer, body: list[str], piece: str) -> dict[str, Any] | None:
    """The names behind the piece if it runs; one in fifty that raises, or is an end in this call, stays, too."""
    try:
        calls = range(len(writer.program.calls))
        found = _try(writer, [*body, piece], calls if writer.tame else [0])
        if not writer.tame and writer.random.random() < 0.6:
            _try(writer, [*body, piece], [writer.random.choice(calls)])
    except (SyntaxError, OverflowError):
        return None
    except Exception:
        return writer.names if not writer.tame and writer.random.random() < 0.005 else None
    if found is None:
        return writer.names if writer.random.random() < 0.1 else None
    return found
