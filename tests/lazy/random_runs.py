"""Runs a random program eagerly and another way, and compares what can be seen after each call.

Invariant: both runs get equal arguments and state. After a call all of these and its results are compared: who is the
same object, shape, dtype, strides, offset, version, flags of autograd, values, gradients, what the body told (errors by
type), and the state of the random generator. After every other call each tensor is written to: who shares memory shows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torchlazy
from torch import nn

from tests.fuzz.compare import Seen, difference, leaves, objects, seen, write_to_all
from tests.lazy.random_programs import SPACE, Program, tensor_of

WAYS = ("lazy", "lazy_mode", "compiled")
_LATE = ("out of range", "out of bounds", "bounds", "ZeroDivisionError")  # lies in the values: raised at the cut


class State:
    """What calls find and leave: numbers, tensors, a module, an optimizer."""

    def __init__(self, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def data(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.k, self.n = 1.25, 1
        self.a, self.b, self.p = data(4, 3), data(4), nn.Parameter(data(3))
        self.l, self.d = [data(3)], dict[str, torch.Tensor]()
        self.m = nn.Linear(3, 3)
        self.m.weight, self.m.bias = nn.Parameter(data(3, 3)), nn.Parameter(data(3))
        parameters = [self.p, *self.m.parameters()]
        self.o: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, 0.1) if seed % 2 else torch.optim.SGD(parameters, 0.1, momentum=0.9)
        )


def arguments(program: Program, call: int, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a call."""
    generator = torch.Generator().manual_seed(program.calls[call].seed)
    sizes = program.calls[call].sizes
    made: dict[str, torch.Tensor] = {}
    last: torch.Tensor | None = None
    for name, dtype, shape, leaf, layout in program.inputs:
        t = tensor_of(dtype, tuple(sizes.get(size, size) for size in shape), generator)
        match layout:
            case "every other":
                t = torch.cat([t.reshape(-1), t.reshape(-1)]).to(device)[1::2]
            case "turned" if t.dim() == 2:
                t = t.to(device).t()
            case "expanded":
                t = t.to(device)[None].expand(2, *t.shape)
            case "channels last" if t.dim() == 4:
                t = t.to(device).contiguous(memory_format=torch.channels_last)
            case "of the last" if last is not None and not last.requires_grad:
                t = last.reshape(-1)[1:] if last.is_contiguous() else last.detach()
        made[name] = last = t.to(device)
        if leaf and last.is_leaf and (last.is_floating_point() or last.is_complex()):
            last.requires_grad_()
    return made


def world(program: Program, call: int, device: str) -> dict[str, Any]:
    """The names that a line has while a program is drawn."""
    numbers = dict(zip(("k0", "k1", "k2"), program.calls[call].numbers, strict=True))
    return {
        **arguments(program, call, device),
        **numbers,
        "S": State(device, program.seed),
        "dev": device,
        "tell": lambda what: None,
    }


def _played(
    program: Program,
    device: str,
    wrap: Callable[[Any], Any],
    around: Callable[[], Any],
    places: dict[int, list[str]],
) -> Iterator[Seen]:
    torch.manual_seed(program.seed)
    state = State(device, program.seed)
    names = {**SPACE, "S": state, "dev": device}
    exec(compile(program.source(), f"<random program {program.seed}>", "exec"), names)
    function = wrap(names["body"])
    for number, call in enumerate(program.calls):
        with contextlib.suppress(Exception):
            exec(call.change, names)
        args = arguments(program, number, device)
        told: list[Any] = []

        def tell(what: Any, told: list[Any] = told) -> None:
            told.append(what if isinstance(what, (bool, int, list)) else str(what))

        with around():
            result = function(device, tell, state, *call.numbers, *args.values())
        kept = {name: value for name, value in vars(state).items() if name not in ("m", "o")}
        moments = [state.o.state.get(p, {}) for group in state.o.param_groups for p in group["params"]]
        items = list(leaves(args, "argument"))
        items += leaves({"result": result, "S": kept, "module": dict(state.m.named_parameters()), "o": moments}, "")
        found = [("told", told, None), *seen(items), ("generator", None, torch.get_rng_state())]
        if (program.seed + number) % 2:
            found += write_to_all(items, places.setdefault(number, objects(items)))
        yield found


def wrong(program: Program, way: str) -> str:
    """What the program shows otherwise than eagerly; "" if nothing."""
    compiled = (lambda f: torchlazy.compile(f, audit=program.seed % 4 == 0)) if way == "compiled" else (lambda f: f)
    around = torchlazy.lazy_mode if way == "lazy_mode" else contextlib.nullcontext
    number = 0
    places: dict[int, list[str]] = {}  # that are written to after a call: an object each, eagerly
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = list(_played(program, "cpu", lambda f: f, contextlib.nullcontext, places))
        run = _played(program, "lazy" if way == "lazy" else "cpu", compiled, around, places)
        try:
            for number, want in enumerate(expected):
                found = difference(next(run), want)
                if found:
                    return f"call {number}: {found.text}"
        except Exception as error:
            return "" if any(text in str(error) for text in _LATE) else f"call {number}: {error!r}"
        finally:
            run.close()
            with contextlib.suppress(Exception):
                torchlazy.sync()
    return ""


def reduced(program: Program, way: str, again: Callable[[], None]) -> Program:
    """The program without the lines and calls that its difference does not need. `again` forgets what was compiled."""

    def fails(candidate: Program) -> bool:
        again()
        return bool(wrong(candidate, way))

    smaller = True
    while smaller:
        smaller = False
        for number in reversed(range(len(program.lines))):
            less = replace(program, lines=program.lines[:number] + program.lines[number + 1 :])
            if fails(less):
                program, smaller = less, True
        for number in reversed(range(len(program.calls))):
            less = replace(program, calls=program.calls[:number] + program.calls[number + 1 :])
            if less.calls and fails(less):
                program, smaller = less, True
    return program
