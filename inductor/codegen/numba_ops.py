"""Loop bodies as Python for Numba: the handler under which a body prints scalar statements.

Invariant: every printed expression has exactly the Numba type of its value's dtype. Numba computes small integers in 64
bits, so results of integer arithmetic are cast back, which is also how they wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torchlazy.inductor.analyses import UniformHandler, work_of
from torchlazy.inductor.codegen.expr import PYTHON, print_expr
from torchlazy.inductor.index import axis
from torchlazy.prims.size_int import SizeFloat, is_tracked

HALVES = {torch.float16: "half", torch.bfloat16: "bf16"}
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_PREDICATES = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit", "logical_not"))

# Texts by op; {T} is the value's type. Numba's math functions keep float32.
_FLOAT = {
    "neg": "-{0}", "abs": "abs({0})", "sign": "{T}(sign_of({0}))", "ceil": "np.ceil({0})", "floor": "np.floor({0})",
    "trunc": "np.trunc({0})", "round": "np.rint({0})", "sqrt": "np.sqrt({0})", "rsqrt": "{T}(1) / np.sqrt({0})",
    "reciprocal": "{T}(1) / {0}", "exp": "np.exp({0})", "exp2": "np.exp2({0})", "expm1": "np.expm1({0})",
    "log": "np.log({0})", "log2": "np.log2({0})", "log10": "np.log10({0})", "log1p": "np.log1p({0})",
    "sin": "np.sin({0})", "cos": "np.cos({0})", "tan": "np.tan({0})", "asin": "np.arcsin({0})",
    "acos": "np.arccos({0})", "atan": "np.arctan({0})", "sinh": "np.sinh({0})", "cosh": "np.cosh({0})",
    "tanh": "np.tanh({0})", "asinh": "np.arcsinh({0})", "acosh": "np.arccosh({0})", "atanh": "np.arctanh({0})",
    "erf": "math.erf({0})", "erfc": "math.erfc({0})", "erfinv": "erfinv({0})", "lgamma": "lgamma({0})",
    "isnan": "{0} != {0}", "isinf": "abs({0}) == inf", "signbit": "np.copysign({T}(1), {0}) < 0",
    "logical_not": "{0} == 0",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "floor_div": "float_floor_div({0}, {1})", "trunc_div": "np.trunc({T}({0} / {1}))",
    "remainder": "float_remainder({0}, {1})", "fmod": "np.fmod({0}, {1})", "pow": "math.pow({0}, {1})",
    "atan2": "np.arctan2({0}, {1})", "copysign": "np.copysign({0}, {1})", "hypot": "np.hypot({0}, {1})",
    "nextafter": "np.nextafter({0}, {1})", "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})",
    "fmax": "fmax({0}, {1})", "fmin": "fmin({0}, {1})",
}  # fmt: skip
_INT = {
    "neg": "-{0}", "abs": "abs({0})", "sign": "sign_of({0})", "ceil": "{0}", "floor": "{0}", "trunc": "{0}",
    "round": "{0}", "isnan": "False", "isinf": "False", "signbit": "{0} < 0", "logical_not": "{0} == 0",
    "bitwise_not": "~{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "floor_div": "int_floor_div({0}, {1})", "trunc_div": "int_trunc_div({0}, {1})",
    "remainder": "int_remainder({0}, {1})", "fmod": "int_fmod({0}, {1})", "pow": "int_pow({0}, {1})",
    "maximum": "max({0}, {1})", "minimum": "min({0}, {1})", "fmax": "max({0}, {1})", "fmin": "min({0}, {1})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "shift_left": "shift_left({0}, {1}, {bits})", "shift_right": "shift_right({0}, {1}, {bits})",
}  # fmt: skip
_UINT = _INT | {
    "abs": "{0}", "signbit": "False", "floor_div": "uint_floor_div({0}, {1})", "trunc_div": "uint_floor_div({0}, {1})",
    "remainder": "uint_remainder({0}, {1})", "fmod": "uint_remainder({0}, {1})", "pow": "uint_pow({0}, {1})",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BOOL = {
    "bitwise_not": "not {0}", "logical_not": "not {0}", "bitwise_and": "{0} and {1}", "bitwise_or": "{0} or {1}",
    "bitwise_xor": "{0} != {1}",
}  # fmt: skip


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a loaded element has inside a body."""
    return torch.float32 if dtype in HALVES else dtype


def numba_type(dtype: torch.dtype) -> str:
    """The name of a value's type in generated text."""
    return "boolean" if dtype is torch.bool else str(value_dtype(dtype)).removeprefix("torch.")


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """An expression of exactly the type that `dtype` has in bodies."""
    if dtype is torch.bool:
        return str(bool(value))
    if isinstance(value, SizeFloat):
        return f"{numba_type(dtype)}({value.text(lambda size: f'float64({size})')})"
    if is_tracked(value):
        return f"{numba_type(dtype)}({value})"
    if not value_dtype(dtype).is_floating_point:
        number = int(value)
        return f"{numba_type(dtype)}({number})" if number > -(2**63) else "int64(-9223372036854775807 - 1)"
    value = float(value)
    text = "nan" if math.isnan(value) else repr(value)
    return f"{numba_type(dtype)}({text})"


@dataclass(frozen=True, slots=True)
class NumbaValue:
    """A Python name or literal."""

    text: str
    dtype: torch.dtype


@dataclass(slots=True)
class NumbaKernelState:
    """What the whole kernel shares: parameters, index checks and the numbering of temporaries."""

    pointer_of: Mapping[str, str]
    pointer_dtype: Mapping[str, torch.dtype]
    scalar_of: Mapping[str, str]
    checks: list[str] = field(default_factory=list)
    temporaries: int = 0
    work: int = 0

    def fresh(self, prefix: str = "t") -> str:
        self.temporaries += 1
        return f"{prefix}{self.temporaries - 1}"


@dataclass(slots=True)
class NumbaBlock:
    """Statements of one indentation; `known` finds an expression printed before."""

    lines: list[str] = field(default_factory=list)
    known: dict[str, NumbaValue] = field(default_factory=dict)


class NumbaOps(UniformHandler[NumbaValue]):
    """Prints the statements of one sweep, into `lines`."""

    def __init__(self, state: NumbaKernelState, registers: dict[str, NumbaValue]) -> None:
        self.state = state
        self.registers = registers
        self.blocks = [NumbaBlock()]

    @property
    def lines(self) -> list[str]:
        return self.blocks[-1].lines

    def emit(self, text: str, dtype: torch.dtype, prefix: str = "t") -> NumbaValue:
        """`text` under a name; the same text again is the same name."""
        for block in self.blocks:
            if text in block.known:
                return block.known[text]
        value = NumbaValue(self.state.fresh(prefix), dtype)
        self.lines.append(f"{value.text} = {text}")
        self.blocks[-1].known[text] = value
        return value

    # ---- arithmetic

    def pointwise(self, op: str, operands: tuple[NumbaValue, ...]) -> NumbaValue:
        self.state.work += work_of(op)
        texts = [value.text for value in operands]
        dtype = operands[0].dtype
        if op == "where":
            return self.emit(f"{texts[1]} if {texts[0]} else {texts[2]}", operands[1].dtype)
        if dtype is torch.bool:
            if op in _BOOL:
                return self.emit(_BOOL[op].format(*texts), torch.bool)
            return self._on_bools(op, operands)
        if op in _COMPARE:
            return self.emit(f"{texts[0]} {_COMPARE[op]} {texts[1]}", torch.bool)
        table = _FLOAT if dtype.is_floating_point else _UINT if dtype in _UNSIGNED else _INT
        kind = numba_type(dtype)
        text = table[op].format(*texts, T=kind, bits=8 * dtype.itemsize)
        if op in _PREDICATES:
            return self.emit(text, torch.bool)
        return self.emit(f"{kind}({text})", dtype)

    def _on_bools(self, op: str, operands: tuple[NumbaValue, ...]) -> NumbaValue:
        """Comparisons and the like on bools: as on the numbers 0 and 1."""
        result = self.pointwise(op, tuple(self.to_dtype(value, torch.uint8) for value in operands))
        return result if result.dtype is torch.bool else self.to_dtype(result, torch.bool)

    def to_dtype(self, value: NumbaValue, dtype: torch.dtype) -> NumbaValue:
        if dtype in HALVES:
            value = self.to_dtype(value, torch.float32)
            return self.emit(f"round_to_{HALVES[dtype]}({value.text})", torch.float32)
        if value.dtype is dtype:
            return value
        if dtype is torch.bool:
            return self.emit(f"{value.text} != 0", torch.bool)
        text = value.text
        if value.dtype.is_floating_point and not dtype.is_floating_point and dtype is not torch.int64:
            text = f"int64({text})"  # a direct conversion of what is negative to an unsigned type has no meaning
        return self.emit(f"{numba_type(dtype)}({text})", dtype)

    def bitcast(self, value: NumbaValue, dtype: torch.dtype) -> NumbaValue:
        if value.dtype is dtype:
            return value
        if value.dtype is torch.bool:
            return self.bitcast(self.to_dtype(value, torch.uint8), dtype)
        if dtype is torch.bool:
            return self.to_dtype(value, dtype)
        return self.emit(f"bitcast({value.text}, {numba_type(dtype)})", dtype)

    def random_bits(self, seed: NumbaValue, stream: NumbaValue, counter: NumbaValue) -> NumbaValue:
        self.state.work += work_of("random_bits")
        return self.emit(f"philox_word0({seed.text}, {stream.text}, {counter.text})", torch.int32)

    # ---- leaves

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> NumbaValue:
        constant = NumbaValue(literal(value, dtype), value_dtype(dtype))
        return self.to_dtype(constant, dtype) if dtype in HALVES else constant

    def scalar(self, name: str, dtype: torch.dtype) -> NumbaValue:
        text = self.state.scalar_of[name]
        if dtype is torch.bool:
            return self.emit(f"{text} != 0", torch.bool)
        if not value_dtype(dtype).is_floating_point:
            text = f"int64({text})"
        value = self.emit(f"{numba_type(dtype)}({text})", value_dtype(dtype))
        return self.to_dtype(value, dtype) if dtype in HALVES else value

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> NumbaValue:
        value = self.emit(f"int64({self.index_text(expr)})", torch.int64)
        return self.to_dtype(value, dtype)

    def index_text(self, expr: sympy.Expr) -> str:
        return print_expr(sympy.sympify(expr), PYTHON)

    def indirect(self, value: NumbaValue, size: sympy.Expr, what: str) -> sympy.Expr:
        if what not in self.state.checks:
            self.state.checks.append(what)
        position = self.state.checks.index(what) + 1
        text = f"wrap_index({value.text}, {self.index_text(size)}, error, {position})"
        # The prefix is that of no axis: the two would be one symbol where the sizes agree.
        return axis(self.emit(text, torch.int64, prefix="at").text, size)

    # ---- memory

    def load(self, name: str, index: sympy.Expr) -> NumbaValue:
        if name in self.registers:
            return self.registers[name]
        self.state.work += 1
        memory = self.state.pointer_dtype[name]
        expr = sympy.sympify(index)
        if any(getattr(symbol, "size", 1) == 0 for symbol in expr.free_symbols):
            return self.constant(0, value_dtype(memory))  # reported as out of range already: there is nothing to read
        place = f"{self.state.pointer_of[name]}, {self.index_text(expr)}"
        if memory in HALVES:
            return self.emit(f"{HALVES[memory]}_value(load_uint16({place}))", torch.float32)
        return self.emit(f"load_{str(memory).removeprefix('torch.')}({place})", memory)

    def store(self, name: str, index: sympy.Expr, value: NumbaValue) -> None:
        self.state.work += 1
        memory = self.state.pointer_dtype[name]
        if value.dtype is not value_dtype(memory):
            value = self.to_dtype(value, value_dtype(memory))
        pointer = self.state.pointer_of[name]
        place = f"{pointer}, {self.index_text(sympy.sympify(index))}"
        if memory in HALVES:
            self.lines.append(f"store_uint16({place}, {HALVES[memory]}_bits({value.text}))")
        else:
            self.lines.append(f"store_{str(memory).removeprefix('torch.')}({place}, {value.text})")
        for block in self.blocks:  # what was loaded from there may have changed
            block.known = {text: known for text, known in block.known.items() if f"({pointer}, " not in text}

    def masked(self, condition: NumbaValue, body: Callable[[], NumbaValue], other: bool | int | float) -> NumbaValue:
        self.blocks.append(NumbaBlock())
        value = body()
        block = self.blocks.pop()
        name = self.state.fresh()
        fallback = self.constant(other, value.dtype)
        self.lines.extend((f"{name} = {fallback.text}", f"if {condition.text}:"))
        self.lines.extend(indent([*block.lines, f"{name} = {value.text}"]))
        return NumbaValue(name, value.dtype)


def indent(lines: list[str]) -> list[str]:
    """The lines one step further right."""
    return [f"    {line}" for line in lines]
