"""The ops handler that writes a Triton kernel's body: values become names, loop bodies become lines.

Invariant: a line goes to the innermost scope that its operands need. What does not vary over the reduced axes stands
before the reduction loop, once; what is computed twice in one scope is computed once (equal text, equal value). In a
persistent kernel there is no loop, so loads are shared by all sweeps.

A block is `[XBLOCK]` in pointwise kernels, `[XBLOCK, RBLOCK]` where axes are reduced; there a value that varies over
one side only has size 1 on the other, and constants are `[1, 1]`.

An indirect index wraps where negative and is then clamped into range: no trap, no error, no access out of bounds. (The
CPU languages raise IndexError.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torchlazy.inductor.codegen.expr import TRITON, print_expr
from torchlazy.inductor.codegen.triton_index import FlatAxes, reach
from torchlazy.inductor.codegen.triton_ops import (
    FORMULAS,
    HALVES,
    TO_BOOL,
    TritonValue,
    convert_text,
    literal,
    memory_dtype,
    tl_dtype,
)
from torchlazy.inductor.ir import Buffer, Expr
from torchlazy.inductor.ops_handler import POINTWISE_OPS
from torchlazy.inductor.size_symbol import SizeSymbol
from torchlazy.prims.size_int import SizeFloat

X, R = frozenset("x"), frozenset("r")
NOWHERE: frozenset[str] = frozenset()


class TritonWriter:
    """Lines of one kernel body, written by running loop bodies on it as their `ops`."""

    def __init__(
        self,
        x: FlatAxes,
        r: FlatAxes | None,
        buffers: dict[str, Buffer],
        pointer_of: dict[str, str],
        scalar_of: dict[str, str],
        *,
        index_dtype: str,
        xmask: bool,
        rmask: bool,
        persistent: bool = False,
        overwrites: frozenset[str] = frozenset(),
    ) -> None:
        self.x, self.r = x, r
        self.buffers, self.pointer_of, self.scalar_of = buffers, pointer_of, scalar_of
        self.index_dtype = index_dtype
        self.persistent = persistent
        self.overwrites = overwrites  # written buffers whose memory the kernel also reads
        self.mask_names = ("xmask",) * xmask + ("rmask",) * rmask
        self.point_lines: list[str] = []
        self.loop_lines: list[str] | None = None  # a reduction loop under construction
        self.point_registers: dict[str, TritonValue] = {}  # by buffer name, to the end of the point
        self.sweep_registers: dict[str, TritonValue] = {}  # by buffer name, to the end of the sweep
        self.in_reduce_sweep = False
        self.eviction: Callable[[str], str] = lambda name: ""  # set by the owner for each sweep
        self._known_at_point: dict[str, str] = {}  # text -> name
        self._known_in_loop: dict[str, str] = {}
        self._in_memory: dict[tuple[str, str], TritonValue] = {}  # (buffer, index text) -> value stored there
        self._load_texts: dict[str, list[str]] = {}  # buffer -> texts of its loads, to be forgotten when it is written
        self._indirect: dict[sympy.Symbol, TritonValue] = {}
        self._conditions: list[TritonValue] = []
        self._stores: list[str] = []  # held back to the end of the loop body, or of the point
        self._stored: list[str] = []
        self._names = 0

    # --- lines and scopes ---------------------------------------------------------------------------------------------

    def shape(self, deps: frozenset[str]) -> str:
        """The block shape of a value that varies over `deps`."""
        if self.r is None:
            return "[XBLOCK]" if "x" in deps else "[1]"
        return f"[{'XBLOCK' if 'x' in deps else '1'}, {'RBLOCK' if 'r' in deps else '1'}]"

    def fresh(self, prefix: str = "tmp") -> str:
        """A new name."""
        self._names += 1
        return f"{prefix}{self._names - 1}"

    def _scope(self, deps: frozenset[str]) -> tuple[list[str], dict[str, str]]:
        if self.loop_lines is not None and "r" in deps:
            return self.loop_lines, self._known_in_loop
        return self.point_lines, self._known_at_point

    def let(self, text: str, deps: frozenset[str]) -> str:
        """The name of `text`'s value, computed at most once per scope."""
        lines, known = self._scope(deps)
        if text not in known:
            known[text] = self.fresh()
            lines.append(f"{known[text]} = {text}")
        return known[text]

    def line(self, text: str) -> None:
        """A statement of the current sweep."""
        (self.point_lines if self.loop_lines is None else self.loop_lines).append(text)

    def flush_stores(self) -> None:
        """Write out the stores held back.

        They come late so that loads are in flight together: a compiler may not move a load over a store. Where the
        memory is also read by this kernel, every thread must have read its elements first.
        """
        if any(name in self.overwrites for name in self._stored):
            self.line("tl.debug_barrier()")
        for text in self._stores:
            self.line(text)
        self._stores, self._stored = [], []

    def start_loop(self) -> None:
        """What varies over the reduced axes goes into a loop from here on."""
        self.loop_lines, self._known_in_loop = [], {}

    def end_loop(self) -> list[str]:
        """The loop's lines; its values are gone."""
        self.flush_stores()
        lines, self.loop_lines, self._known_in_loop = self.loop_lines or [], None, {}
        return lines

    def end_sweep(self, written: list[str]) -> None:
        """Pointwise values of the sweep end here; loads of what it wrote would be stale."""
        self.sweep_registers = {}
        for name in written:
            for text in self._load_texts.pop(name, []):
                self._known_at_point.pop(text, None)

    # --- indices and masks --------------------------------------------------------------------------------------------

    def index_text(self, expr: Expr) -> tuple[str, frozenset[str]]:
        """An index expression over the flat block indices as text, and the block axes it varies over."""
        expr = sympy.sympify(expr)
        deps = NOWHERE
        for flat_axes, side in ((self.x, X), (self.r, R)):
            if flat_axes is None:
                continue
            expr, definitions = flat_axes.rewrite(expr)
            if flat_axes.varies(expr.free_symbols):
                deps = deps | side
            for symbol, text in definitions.items():
                self._define_part(symbol.name, text, side)
        names = {}
        for symbol in expr.free_symbols:
            if symbol in self._indirect:
                deps = deps | self._indirect[symbol].deps
                names[symbol] = self._indirect[symbol].text
        return print_expr(expr, TRITON, names), deps

    def _define_part(self, name: str, text: str, side: frozenset[str]) -> None:
        lines, known = self._scope(side)
        if name not in known:
            known[name] = name
            lines.append(f"{name} = {text}")

    def mask_of(self, deps: frozenset[str], conditions: bool = True) -> str:
        """The mask of an access over `deps`, or ""."""
        parts = [name for name in self.mask_names if name[0] in deps]
        parts += [condition.text for condition in self._conditions] if conditions else []
        return " & ".join(parts)

    def _address(self, name: str, index: Expr, least: frozenset[str]) -> tuple[str, frozenset[str]]:
        """Pointer text of an access whose block must span `least` at least, and the axes it spans."""
        text, deps = self.index_text(index)
        if not least <= deps:
            deps = deps | least
            free = sympy.sympify(index).free_symbols
            is_number = text.isdigit() or all(isinstance(symbol, SizeSymbol) for symbol in free)
            text = f"tl.broadcast_to({text}, {self.shape(deps)})" if not is_number else (
                f"tl.full({self.shape(deps)}, {text}, {self.index_dtype})")  # fmt: skip
        elif not deps and self._conditions:
            text = f"tl.full({self.shape(deps)}, {text}, {self.index_dtype})"
        return f"{self.pointer_of[name]} + {text if text.isidentifier() or text.isdigit() else f'({text})'}", deps

    # --- memory ops ---------------------------------------------------------------------------------------------------

    def load(self, name: str, index: Expr) -> TritonValue:
        """A register where this point made the value itself, else memory."""
        register = self.sweep_registers.get(name) or self.point_registers.get(name)
        if register is not None:
            return register
        dtype = self.buffers[name].dtype
        spanned = NOWHERE.union(*(condition.deps for condition in self._conditions))
        address, deps = self._address(name, index, spanned)
        if (name, address) in self._in_memory:
            return self._in_memory[name, address]
        mask = self.mask_of(deps)
        hint = self.eviction(name) if deps else ""
        if not hint and self._is_shared(index, deps):
            hint = "evict_last"
        options = f", mask={mask}" * bool(mask) + f', eviction_policy="{hint}"' * bool(hint)
        text = f"tl.load({address}{options})"
        self._load_texts.setdefault(name, []).append(text)
        raw = self.let(text, deps)
        if dtype in HALVES:
            return TritonValue(self.let(f"{raw}.to(tl.float32)", deps), torch.float32, deps, raw, dtype)
        if dtype == torch.bool:
            return TritonValue(self.let(f"{raw}.to(tl.int1)", deps), dtype, deps)
        return TritonValue(raw, dtype, deps)

    def _is_shared(self, index: Expr, deps: frozenset[str]) -> bool:
        """Whether several points read the same element: a parallel axis is missing from the index."""
        if not deps or index.free_symbols & self._indirect.keys():
            return False
        return any(a.symbol not in index.free_symbols for a in self.x.axes)

    def store(self, name: str, index: Expr, value: TritonValue) -> None:
        """A masked store over the whole block of the current sweep, held back until `flush_stores`."""
        whole = X | R if self.in_reduce_sweep else X
        address, deps = self._address(name, index, whole)
        mask = self.mask_of(deps)
        text = self._as_memory(value, self.buffers[name].dtype)
        self._stores.append(f"tl.store({address}, {text}{f', {mask}' if mask else ''})")
        self._stored.append(name)

    def _as_memory(self, value: TritonValue, dtype: torch.dtype) -> str:
        if dtype in HALVES:
            half = self.to_dtype(value, dtype).half
            assert half is not None
            return half
        if dtype == torch.bool:
            return f"{self.to_dtype(value, dtype).text}.to(tl.int8)"
        return self.to_dtype(value, dtype).text

    def keep(self, name: str, index: Expr, value: TritonValue, *, to_end_of_point: bool) -> None:
        """Let later loads of `name` at this point read `value`, as memory of its dtype would return it."""
        value = self.to_dtype(value, self.buffers[name].dtype)
        (self.point_registers if to_end_of_point else self.sweep_registers)[name] = value
        if self.persistent and name in self.pointer_of:
            address, _ = self._address(name, index, NOWHERE)
            self._in_memory[name, address] = value

    def scalar(self, name: str, dtype: torch.dtype) -> TritonValue:
        """A runtime scalar arrives as float64 or int64."""
        if dtype == torch.bool or dtype in HALVES:
            return self.to_dtype(self.scalar(name, torch.float64 if dtype == torch.bool else torch.float32), dtype)
        # The interpreter passes plain numbers: `tl.full` takes those and tensors.
        text = f"tl.full({self.shape(NOWHERE)}, {self.scalar_of[name]}, {tl_dtype(dtype)})"
        return TritonValue(self.let(text, NOWHERE), dtype, NOWHERE)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> TritonValue:
        """A block of size 1: it broadcasts, and its dtype is certain."""
        if isinstance(value, SizeFloat):
            shape = self.shape(NOWHERE)
            text = value.text(lambda size: f"tl.full({shape}, {size}, tl.float64)")
            return TritonValue(self.let(f"({text}).to({tl_dtype(dtype)})", NOWHERE), dtype, NOWHERE)
        if dtype in HALVES:
            value, dtype = torch.tensor(value, dtype=dtype).item(), torch.float32
        text = f"tl.full({self.shape(NOWHERE)}, {literal(value, dtype)}, {tl_dtype(dtype)})"
        return TritonValue(self.let(text, NOWHERE), dtype, NOWHERE)

    def index_expr(self, expr: Expr, dtype: torch.dtype) -> TritonValue:
        """In 64 bits where the value may not fit 32."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return self.constant(int(expr), dtype)
        if all(isinstance(symbol, SizeSymbol) for symbol in expr.free_symbols):
            text = f"tl.full({self.shape(NOWHERE)}, {print_expr(expr, TRITON)}, tl.int64)"
            return self.to_dtype(TritonValue(self.let(text, NOWHERE), torch.int64, NOWHERE), dtype)
        text, deps = self.index_text(expr)
        axes = (*self.x.axes, *(self.r.axes if self.r else ()))
        extent = reach(expr, axes)
        computed = torch.int64 if self.index_dtype == "tl.int64" else torch.int32
        if computed == torch.int32 and (extent is None or extent >= 2**31):
            # The flat index itself fits 32 bits: widen it and compute with that.
            wide = {symbol: sympy.Symbol(self.let(f"{name}.to(tl.int64)", deps), integer=True, nonnegative=True)
                    for name, symbol in self._free_parts(expr).items()}  # fmt: skip
            text, computed = (
                print_expr(self._rewritten(expr).xreplace(wide), TRITON, self._indirect_names()),
                torch.int64,
            )
        name = text if text.isidentifier() else self.let(text, deps)
        return self.to_dtype(TritonValue(name, computed, deps), dtype)

    def _rewritten(self, expr: Expr) -> Expr:
        for flat_axes in (self.x, self.r):
            if flat_axes is not None:
                expr = flat_axes.rewrite(expr)[0]
        return expr

    def _free_parts(self, expr: Expr) -> dict[str, sympy.Symbol]:
        symbols = self._rewritten(expr).free_symbols - self._indirect.keys()
        return {symbol.name: symbol for symbol in sorted(symbols, key=str)}

    def _indirect_names(self) -> dict[sympy.Symbol, str]:
        return {symbol: value.text for symbol, value in self._indirect.items()}

    def indirect(self, value: TritonValue, size: Expr, what: str) -> sympy.Symbol:
        """Wrap, clamp, and narrow to the kernel's index dtype."""
        extent, _ = self.index_text(size)
        if not value.dtype.is_signed:
            value = self.to_dtype(value, torch.int32)
        wrapped = self.let(f"tl.where({value.text} < 0, {value.text} + {extent}, {value.text})", value.deps)
        clamped = self.let(f"tl.minimum(tl.maximum({wrapped}, 0), {extent} - 1)", value.deps)
        name = self.let(f"{clamped}.to({self.index_dtype})", value.deps)
        symbol = sympy.Symbol(f"indirect_{name}", integer=True, nonnegative=True)
        self._indirect[symbol] = TritonValue(name, torch.int64, value.deps)
        return symbol

    def masked(self, condition: TritonValue, body: Callable[[], TritonValue], other: bool | int | float) -> TritonValue:
        """Loads in `body` carry the condition; what else it computes is thrown away where that is false."""
        self._conditions.append(condition)
        inside = body()
        self._conditions.pop()
        return self.where(condition, inside, self.constant(other, inside.dtype))

    def to_dtype(self, value: TritonValue, dtype: torch.dtype) -> TritonValue:
        """Convert; to a half: round, keeping the rounded value both as a half and widened."""
        if dtype in HALVES:
            if value.half_dtype == dtype:
                return value
            single = self.to_dtype(value, torch.float32)
            half = self.let(f"{single.text}.to({tl_dtype(dtype)})", value.deps)
            return TritonValue(self.let(f"{half}.to(tl.float32)", value.deps), torch.float32, value.deps, half, dtype)
        if value.dtype == dtype:
            return value
        return TritonValue(self.let(convert_text(value.text, value.dtype, dtype), value.deps), dtype, value.deps)

    def bitcast(self, value: TritonValue, dtype: torch.dtype) -> TritonValue:
        """A bool is the byte 0 or 1."""
        if torch.bool in (value.dtype, dtype):
            return self.to_dtype(value, dtype)
        return TritonValue(
            self.let(f"{value.text}.to({memory_dtype(dtype)}, bitcast=True)", value.deps), dtype, value.deps
        )

    def random_bits(self, seed: TritonValue, stream: TritonValue, counter: TritonValue) -> TritonValue:
        """Philox with the arguments in the widths that the helper expects."""
        arguments = [
            self.to_dtype(v, t) for v, t in ((seed, torch.int64), (stream, torch.int32), (counter, torch.int64))
        ]
        deps = seed.deps | stream.deps | counter.deps
        text = f"philox_word0({', '.join(argument.text for argument in arguments)})"
        return TritonValue(self.let(text, deps), torch.int32, deps)

    # --- pointwise ops ------------------------------------------------------------------------------------------------

    def __getattr__(self, op: str) -> Any:
        if op not in POINTWISE_OPS or op not in FORMULAS:
            raise AttributeError(f"{type(self).__name__} has no op {op}")
        return lambda *operands: self._pointwise(op, operands)

    def _pointwise(self, op: str, operands: tuple[TritonValue, ...]) -> TritonValue:
        dtype = operands[-1].dtype
        typed = operands[1:] if op == "where" else operands
        if any(operand.dtype != dtype for operand in typed):
            dtypes = ", ".join(str(operand.dtype) for operand in typed)
            raise TypeError(f"triton: {op} of {dtypes}: operands must have one dtype; use to_dtype before")
        deps = NOWHERE.union(*(operand.deps for operand in operands))
        text = FORMULAS[op](dtype, *(operand.text for operand in operands))
        for operand in operands:
            if text == operand.text:  # a rounding of ints, say
                return operand
        return TritonValue(self.let(text, deps), torch.bool if op in TO_BOOL else dtype, deps)
