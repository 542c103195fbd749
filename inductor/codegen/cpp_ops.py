"""Loop bodies as C++: the handler under which a body prints statements over scalars and vectors.

Invariant: every value knows its dtype, whether it is a vector along the kernel's vector axis, and its level: the
innermost loop that it depends on. A pure value is printed once, in the block of its level, so what does not change in a
loop stands outside it. Under `masked` everything stays inside the guarded block, for its loads are legal only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import sympy
import torch
from torchlazy.inductor.analyses import UniformHandler, work_of
from torchlazy.inductor.codegen.expr import print_expr
from torchlazy.inductor.index import AxisSymbol, axis, stride_of
from torchlazy.inductor.size_symbol import SizeSymbol
from torchlazy.prims.size_int import SizeFloat, is_tracked, surely_equal

CPP_TYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint16: "uint16_t",
    torch.uint32: "uint32_t",
    torch.uint64: "uint64_t",
    torch.float16: "tl::Half",
    torch.bfloat16: "tl::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
}
HALVES = {torch.float16: "half", torch.bfloat16: "bf16"}
_PREDICATES = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit", "logical_not"))
_ON_MASKS = frozenset(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_not"))

FUNCTION, TASK = 0, 1  # levels: once a call, once a task; loops follow


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a loaded element has inside a body."""
    return torch.float32 if dtype in HALVES else dtype


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A C++ expression of exactly the type that `dtype` has in bodies."""
    if dtype is torch.bool:
        return "true" if value else "false"
    kind = CPP_TYPES[value_dtype(dtype)]
    if isinstance(value, SizeFloat):
        return f"{kind}({value.text(lambda size: f'double({size})')})"
    if is_tracked(value):
        return f"{kind}({value})"
    if not value_dtype(dtype).is_floating_point:
        number = int(value)
        if dtype is torch.int64 and number == -(2**63):
            return "INT64_MIN"
        return f"{kind}({number})" if abs(number) < 2**31 else f"{kind}(INT64_C({number}))"
    suffix, name = ("f", "f") if kind == "float" else ("", "")
    value = float(value)
    if math.isnan(value):
        return f'__builtin_nan{name}("")'
    with np.errstate(over="ignore"):
        rounded = np.float32(value) if kind == "float" else np.float64(value)
    if np.isinf(rounded):
        return f"{'-' if value < 0 else ''}__builtin_inf{name}()"
    text = str(rounded)
    return (text if "." in text or "e" in text else text + ".0") + suffix


@dataclass(frozen=True, slots=True)
class CppValue:
    """A C++ name or literal. `level` of a literal is FUNCTION."""

    text: str
    dtype: torch.dtype
    level: int = FUNCTION
    vector: bool = False


@dataclass(slots=True)
class CppBlock:
    """Statements of one loop level, or of one guarded block; `known` finds an expression printed before."""

    lines: list[str] = field(default_factory=list)
    known: dict[str, CppValue] = field(default_factory=dict)
    level: int = FUNCTION  # of a guarded block: the innermost level that something in it depends on


@dataclass(frozen=True, slots=True)
class IndirectIndex:
    """A checked index in C++: an int64_t, or (vector) one for each lane."""

    text: str
    level: int
    vector: bool


@dataclass(slots=True)
class CppKernelState:
    """What the whole kernel shares: temporaries, parameters, checks, and how wide its vectors may be."""

    pointer_of: Mapping[str, str]
    pointer_dtype: Mapping[str, torch.dtype]
    scalar_of: Mapping[str, str]
    checks: list[str] = field(default_factory=list)
    temporaries: int = 0
    wide: bool = False  # a vector of 8-byte values exists

    def fresh(self, prefix: str = "t") -> str:
        self.temporaries += 1
        return f"{prefix}{self.temporaries - 1}"


class CppOps(UniformHandler[CppValue]):
    """Prints one sweep. `blocks` are function, task, then its loops; `levels` places each symbol."""

    def __init__(
        self,
        state: CppKernelState,
        blocks: list[CppBlock],
        levels: Mapping[sympy.Symbol, int],
        vector: AxisSymbol | None,
        registers: dict[str, CppValue],
        inner: AxisSymbol | None = None,
    ) -> None:
        self.state = state
        self.blocks = blocks
        self.levels = levels
        self.vector = vector
        self.registers = registers
        self.inner = inner  # looped over inside the vectors, in blocks of L: levels[inner] - 1 is the block's
        self.indirect_indices: dict[sympy.Symbol, IndirectIndex] = {}
        self.guards: list[CppBlock] = []
        self.mask: CppValue | None = None  # vector mask of the guarded blocks around
        self.work = 0

    @property
    def deepest(self) -> CppBlock:
        return self.guards[-1] if self.guards else self.blocks[-1]

    # ------------------------------------------------------------------ printing
    def emit(self, text: str, dtype: torch.dtype, level: int, vector: bool, prefix: str = "t") -> CppValue:
        """`text` under a name, in the block of its level; the same text again is the same name."""
        if vector and dtype.itemsize == 8:
            self.state.wide = True
        block = self.guards[-1] if self.guards else self.blocks[level]
        for seen in (*reversed(self.guards), self.blocks[level]):
            if text in seen.known:
                return seen.known[text]
        name = self.state.fresh(prefix)
        kind = "const auto" if vector else f"const {CPP_TYPES[dtype]}"
        block.lines.append(f"{kind} {name} = {text};")
        block.level = max(block.level, level)
        block.known[text] = value = CppValue(name, dtype, level, vector)
        return value

    def as_vector(self, value: CppValue) -> str:
        """The text of `value` as a vector."""
        if value.vector:
            return value.text
        if value.dtype is torch.bool:
            return f"splat_mask<L>({value.text})"
        if value.dtype.itemsize == 8:
            self.state.wide = True
        return f"splat<{CPP_TYPES[value.dtype]}, L>({value.text})"

    def _operands(self, operands: tuple[CppValue, ...]) -> tuple[list[str], int, bool]:
        vector = any(value.vector for value in operands)
        texts = [self.as_vector(value) if vector else value.text for value in operands]
        return texts, max(value.level for value in operands), vector

    # ------------------------------------------------------------------ arithmetic
    def pointwise(self, op: str, operands: tuple[CppValue, ...]) -> CppValue:
        self.work += work_of(op)
        if op == "where":
            return self._where(*operands)
        if operands[0].dtype is torch.bool and op not in _ON_MASKS:
            return self._on_bools(op, operands)
        texts, level, vector = self._operands(operands)
        dtype = torch.bool if op in _PREDICATES else operands[0].dtype
        if op == "logical_not" and operands[0].dtype is torch.bool:
            op = "bitwise_not"
        return self.emit(f"tl::{op}({', '.join(texts)})", dtype, level, vector)

    def _on_bools(self, op: str, operands: tuple[CppValue, ...]) -> CppValue:
        """Comparisons and the like on bools: as on the numbers 0 and 1."""
        result = self.pointwise(op, tuple(self.to_dtype(value, torch.uint8) for value in operands))
        return result if result.dtype is torch.bool else self.to_dtype(result, torch.bool)

    def _where(self, condition: CppValue, a: CppValue, b: CppValue) -> CppValue:
        level = max(condition.level, a.level, b.level)
        if condition.vector:
            name = "where_mask" if a.dtype is torch.bool else "where"
            return self.emit(
                f"{name}({condition.text}, {self.as_vector(a)}, {self.as_vector(b)})", a.dtype, level, True
            )
        texts, _, vector = self._operands((a, b))
        return self.emit(f"where({condition.text}, {texts[0]}, {texts[1]})", a.dtype, level, vector)

    def to_dtype(self, value: CppValue, dtype: torch.dtype) -> CppValue:
        if dtype in HALVES:
            value = self.to_dtype(value, torch.float32)
            return self.emit(f"round_to_{HALVES[dtype]}({value.text})", torch.float32, value.level, value.vector)
        if value.dtype is dtype:
            return value
        if value.vector and dtype is torch.bool:
            return self.emit(f"to_mask({value.text})", dtype, value.level, True)
        kind = CPP_TYPES[dtype]
        convert = "from_mask" if value.vector and value.dtype is torch.bool else "convert"
        return self.emit(f"{convert}<{kind}>({value.text})", dtype, value.level, value.vector)

    def bitcast(self, value: CppValue, dtype: torch.dtype) -> CppValue:
        if torch.bool in (value.dtype, dtype) and value.dtype is not dtype:
            if value.dtype is torch.bool:
                return self.bitcast(self.to_dtype(value, torch.uint8), dtype)
            return self.to_dtype(value, dtype)
        kind = f"Vec<{CPP_TYPES[dtype]}, L>" if value.vector else CPP_TYPES[dtype]
        return self.emit(f"bits_to<{kind}>({value.text})", dtype, value.level, value.vector)

    def random_bits(self, seed: CppValue, stream: CppValue, counter: CppValue) -> CppValue:
        self.work += work_of("random_bits")
        level = max(seed.level, stream.level, counter.level)
        vector = seed.vector or stream.vector or counter.vector
        if seed.vector or stream.vector:
            raise NotImplementedError("random_bits: seed and stream must not change along the vector axis")
        return self.emit(f"tl::random_bits({seed.text}, {stream.text}, {counter.text})", torch.int32, level, vector)

    # ------------------------------------------------------------------ leaves
    def constant(self, value: bool | int | float, dtype: torch.dtype) -> CppValue:
        constant = CppValue(literal(value, dtype), value_dtype(dtype))
        return self.to_dtype(constant, dtype) if dtype in HALVES else constant

    def scalar(self, name: str, dtype: torch.dtype) -> CppValue:
        kind = CPP_TYPES[value_dtype(dtype)]
        value = self.emit(f"convert<{kind}>({self.state.scalar_of[name]})", value_dtype(dtype), FUNCTION, False)
        return self.to_dtype(value, dtype) if dtype in HALVES else value

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> CppValue:
        expr = sympy.sympify(expr)
        if dtype is torch.bool or dtype in HALVES:
            return self.to_dtype(self.index_expr(expr, torch.int64), dtype)
        level, vector = self._placement(expr)
        kind = CPP_TYPES[dtype]
        if not vector:
            text = self.index_text(expr)
            return self.emit(f"{kind}({text})", dtype, level, False)
        stride = self._stride(expr)
        if stride is not None and not dtype.is_floating_point:
            return self.emit(f"iota<{kind}, L>({self.index_text(expr)}, {stride})", dtype, level, True)
        return self.emit(
            f"gather<L>(Full<L>{{}}, [&](int k) {{ return {kind}({self.lane_text(expr)}); }})", dtype, level, True
        )

    # ------------------------------------------------------------------ indices
    def _placement(self, expr: sympy.Expr) -> tuple[int, bool]:
        """The level of an index expression, and whether it changes along the vector axis."""
        level, vector = FUNCTION, False
        for symbol in expr.free_symbols:
            indirect = self.indirect_indices.get(symbol)
            if indirect is not None:
                level, vector = max(level, indirect.level), vector or indirect.vector
            elif isinstance(symbol, SizeSymbol):
                continue
            elif symbol in self.levels:
                level, vector = max(level, self.levels[symbol]), vector or symbol == self.vector
            else:
                raise KeyError(f"C++ kernel: index {expr} uses {symbol}, which is no axis of this sweep")
        return level, vector

    def _stride(self, expr: sympy.Expr) -> int | None:
        """How far neighbouring lanes stand apart; None where that varies."""
        if any(i.vector for s, i in self.indirect_indices.items() if s in expr.free_symbols):
            return None
        stride = stride_of(expr, self.vector)
        return stride if isinstance(stride, int) else None

    def _is_contiguous(self, expr: sympy.Expr) -> bool:
        """Whether neighbouring lanes are sure to be neighbours in memory."""
        stride = self._stride(expr)
        return stride is not None and surely_equal(stride, 1)

    def index_text(self, expr: sympy.Expr) -> str:
        return print_expr(expr, names={s: i.text for s, i in self.indirect_indices.items()})

    def lane_text(self, expr: sympy.Expr) -> str:
        """The index of lane `k`."""
        names = {s: f"{i.text}[k]" if i.vector else i.text for s, i in self.indirect_indices.items()}
        if self.vector is not None:
            names[self.vector] = f"({self.vector.name} + k)"
        return print_expr(expr, names=names)

    def indirect(self, value: CppValue, size: sympy.Expr, what: str) -> sympy.Expr:
        size_text = print_expr(size)
        if what not in self.state.checks:
            self.state.checks.append(what)
        position = self.state.checks.index(what) + 1
        if value.vector:
            valid = self.mask.text if self.mask is not None else "lane_mask(lanes)"
            text = f"wrap_indices<L>({value.text}, {size_text}, {valid}, error, {position})"
            self.state.wide = self.state.wide or value.dtype.itemsize == 8
        else:
            text = f"wrap_index({value.text}, {size_text}, error, {position})"
        # Not through `emit`: an index is no value, and its vector form no vector.
        block = self.guards[-1] if self.guards else self.blocks[value.level]
        found = next((b.known[text] for b in (*self.guards, block) if text in b.known), None)
        if found is None:
            name = self.state.fresh("at")  # no name of an axis: the two would be one symbol where the sizes agree
            block.lines.append(f"const auto {name} = {text};")
            block.level = max(block.level, value.level)
            block.known[text] = found = CppValue(name, torch.int64, value.level, False)
        symbol = axis(found.text, size)
        self.indirect_indices[symbol] = IndirectIndex(found.text, value.level, value.vector)
        return symbol

    # ------------------------------------------------------------------ memory
    def load(self, name: str, index: sympy.Expr) -> CppValue:
        if name in self.registers:
            value = self.registers[name]
            if value.vector and value.text.endswith(("]", ")")):  # a slot of a tile: read where it is needed
                assert self.vector is not None
                return self.emit(value.text, value.dtype, self.levels[self.vector], True)
            return value
        self.work += 1
        index = sympy.sympify(index)
        pointer, dtype = self.state.pointer_of[name], value_dtype(self.state.pointer_dtype[name])
        if any(symbol.size == 0 for symbol in index.free_symbols if symbol in self.indirect_indices):
            return self.constant(0, dtype)  # reported as out of range already; there is no element to read
        level, vector = self._placement(index)
        if not vector:
            return self.emit(f"load({_address(pointer, self.index_text(index))})", dtype, level, False)
        if self._is_contiguous(index):
            address = _address(pointer, self.index_text(index))
            if self.mask is not None:
                return self.emit(f"load_masked<L>({address}, {self.mask.text})", dtype, level, True)
            return self.emit(f"load<L>({address}, lanes)", dtype, level, True)
        turned = self._load_turned(pointer, index, dtype)
        if turned is not None:
            return turned
        self.work += 2
        how = f"gather_masked<L>({self.mask.text}" if self.mask is not None else "gather<L>(lanes"
        lane = _address(pointer, self.lane_text(index))
        return self.emit(f"{how}, [&](int k) {{ return load({lane}); }})", dtype, level, True)

    def _load_turned(self, pointer: str, index: sympy.Expr, dtype: torch.dtype) -> CppValue | None:
        """A load that is contiguous along `inner`: a square is read by rows and turned, once a block."""
        if self.inner is None or self.guards:
            return None
        level, stride = self.levels[self.inner], self._stride(index)
        others = index.free_symbols - {self.vector, self.inner}
        if stride is None or stride_of(index, self.inner) != 1 or self._placement_of(others) >= level - 1:
            return None
        start = f"{self.inner.name}_block"
        names = {s: i.text for s, i in self.indirect_indices.items()} | {self.inner: start}
        address = _address(pointer, print_expr(index, names=names))
        block = self.blocks[level - 1]
        if address not in block.known:
            name = self.state.fresh("b")
            kind = "Mask<L>" if dtype is torch.bool else f"Vec<{CPP_TYPES[dtype]}, L>"
            block.lines += [
                f"{kind} {name}[L];",
                f"load_transposed<L>({name}, {address}, {stride}, lanes, {self.inner.name}_count);",
            ]
            block.known[address] = CppValue(f"{name}[{self.inner.name} - {start}]", dtype, level, True)
        return self.emit(block.known[address].text, dtype, level, True)

    def _placement_of(self, symbols: Iterable[sympy.Basic]) -> int:
        return max((self._placement(symbol)[0] for symbol in symbols), default=FUNCTION)

    def store(self, name: str, index: sympy.Expr, value: CppValue) -> None:
        pointer, dtype = self.state.pointer_of[name], value_dtype(self.state.pointer_dtype[name])
        value = self.to_dtype(value, dtype)
        index = sympy.sympify(index)
        self.work += 1
        lines = self.deepest.lines
        if not self._placement(index)[1]:
            if value.vector:
                raise ValueError(f"C++ kernel: store to {name}[{index}] writes many lanes to one element")
            lines.append(f"store({_address(pointer, self.index_text(index))}, {value.text});")
        elif self._is_contiguous(index):
            lines.append(f"store({_address(pointer, self.index_text(index))}, {self.as_vector(value)}, lanes);")
        else:
            lane = _address(pointer, self.lane_text(index))
            element = "e != 0" if dtype is torch.bool else "e"
            put = f"[&](int k, auto e) {{ store({lane}, {element}); }}"
            lines.append(f"scatter(lanes, {self.as_vector(value)}, {put});")

    def masked(self, condition: CppValue, body: Callable[[], CppValue], other: bool | int | float) -> CppValue:
        outer_mask = self.mask
        block = CppBlock(level=condition.level)
        if condition.vector:
            mask = self.emit(f"active({condition.text}, lanes)", torch.bool, condition.level, True, prefix="m")
            if outer_mask is not None:
                mask = self.pointwise("bitwise_and", (outer_mask, mask))
            self.mask, test = mask, f"any_lane({mask.text})"
        else:
            test = condition.text
        self.guards.append(block)
        value = body()
        self.guards.pop()
        result_vector = value.vector or condition.vector
        inner_mask, self.mask = self.mask, outer_mask
        name = self.state.fresh()
        fallback = self.constant(other, value.dtype)
        if condition.vector:
            assert inner_mask is not None
            choose = "where_mask" if value.dtype is torch.bool else "where"
            block.lines.append(f"{name} = {choose}({inner_mask.text}, {self.as_vector(value)}, {name});")
        else:
            block.lines.append(f"{name} = {self.as_vector(value) if result_vector else value.text};")
        level = max(block.level, value.level)
        target = self.guards[-1] if self.guards else self.blocks[level]
        start = self.as_vector(fallback) if result_vector else fallback.text
        kind = "auto" if result_vector else CPP_TYPES[value.dtype]
        target.lines += [f"{kind} {name} = {start};", f"if ({test}) {{", *indent(block.lines), "}"]
        target.level = max(target.level, level)
        return CppValue(name, value.dtype, level, result_vector)


def indent(lines: list[str]) -> list[str]:
    """The lines one step further right."""
    return [f"  {line}" for line in lines]


def _address(pointer: str, index: str) -> str:
    return pointer if index == "0" else f"{pointer} + {index}"
