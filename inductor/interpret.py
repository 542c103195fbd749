"""The reference interpreter of loop graphs: every body run on tensors that hold all its points at once.

Invariant: exact semantics and no speed. Each symbol is an int64 tensor along its own axis of the iteration space; a
load is a gather from the buffer's memory that is checked against its bounds (a load outside is a compiler error, an
indirect index outside the user's IndexError). Scalar ops are the primitives' eager references. Code generators are
tested against this module. Everything runs on the CPU, whatever devices the graph names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torchlazy.inductor.analyses import UniformHandler, node_index
from torchlazy.inductor.index import axis, evaluate
from torchlazy.inductor.ir import Buffer, BufferRef, ExternNode, LoopGraph, LoopNode, ViewNode
from torchlazy.prims.ops import PRIMS
from torchlazy.prims.random_bits import MULTIPLIERS, ROUNDS, WEYL
from torchlazy.runtime.program.program import VALUE_CHECK

HALVES = (torch.float16, torch.bfloat16)


class InterpretError(Exception):
    """A loop graph does what no loop graph may do: a load or store outside its buffer.

    Cause: a wrong index map in lowering, not the user's program. Fix: the lowering rule of the node that is named.
    """


def run(graph: LoopGraph, inputs: Sequence[torch.Tensor], scalars: Sequence[Any] = ()) -> list[torch.Tensor]:
    """The outputs of a loop graph. Inputs are not written to, donated or not."""
    memory = Memory()
    for buffer, tensor in zip(graph.inputs, inputs, strict=True):
        memory.bind(buffer, tensor)
    numbers = dict(zip((name for name, _ in graph.scalars), scalars, strict=True))
    for node in graph.nodes:
        run_node(node, memory, numbers)
    return [memory.tensors[name] for name in graph.outputs]


def run_node(
    node: LoopNode | ExternNode | ViewNode,
    memory: Memory,
    scalars: Mapping[str, Any],
    handler: type[EvalHandler] | None = None,
) -> None:
    """Run one node: its outputs are in `memory` afterwards. `handler` computes loop bodies in another way."""
    if isinstance(node, ViewNode):
        memory.view(node.output, node.source)
    elif isinstance(node, ExternNode):
        _run_extern(node, memory, scalars)
    else:
        _run_loop(node, memory, scalars, handler or EvalHandler)


class Memory:
    """Buffers by name: the tensor, and its memory as a flat tensor that element offsets index."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.flat: dict[str, torch.Tensor] = {}

    def bind(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Take `tensor` for `buffer`, its element 0 at offset `buffer.offset`."""
        start = tensor.storage_offset() - int(buffer.offset)
        size = int(buffer.offset) + extent(tuple(tensor.shape), tensor.stride())
        self.tensors[buffer.name] = tensor
        self.flat[buffer.name] = torch.as_strided(tensor, (size,), (1,), start)

    def allocate(self, buffer: Buffer) -> torch.Tensor:
        """Fresh memory for `buffer`, filled with a pattern so that what nobody wrote is seen."""
        tensor = torch.empty_strided(ints(buffer.shape), ints(buffer.strides), dtype=buffer.dtype)
        self.bind(buffer, tensor)
        self.flat[buffer.name].fill_(float("nan") if buffer.dtype.is_floating_point else 1)
        return tensor

    def view(self, buffer: Buffer, source: str) -> None:
        """`buffer` is a window on the memory of `source`."""
        flat = self.flat[source]
        self.flat[buffer.name] = flat
        offset = flat.storage_offset() + int(buffer.offset)
        self.tensors[buffer.name] = torch.as_strided(flat, ints(buffer.shape), ints(buffer.strides), offset)


def ints(dims: Sequence[Any]) -> tuple[int, ...]:
    """Dimensions as plain ints; a symbolic one is an error here."""
    return tuple(int(dim) for dim in dims)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a strided layout spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class EvalHandler(UniformHandler[torch.Tensor]):
    """Computes a body. Values are tensors that broadcast against the iteration space."""

    def __init__(self, memory: Memory, scalars: Mapping[str, Any], symbols: dict[sympy.Symbol, Any]) -> None:
        self.memory = memory
        self.scalars = scalars
        self.symbols = symbols
        self._mask: torch.Tensor | None = None

    def pointwise(self, op: str, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return PRIMS[op](*operands)

    def load(self, name: str, index: sympy.Expr) -> torch.Tensor:
        position = self._checked(name, index)
        value = self.memory.flat[name][position]
        return value.float() if value.dtype in HALVES else value

    def _checked(self, name: str, index: sympy.Expr) -> torch.Tensor:
        flat = self.memory.flat[name]
        position = torch.as_tensor(evaluate(index, self.symbols))
        if self._mask is not None:
            position = torch.where(self._mask, position, 0)
            if flat.numel() == 0 and not bool(self._mask.any()):
                self.memory.flat[name] = torch.zeros(1, dtype=flat.dtype)
                flat = self.memory.flat[name]
        if position.numel() and (int(position.min()) < 0 or int(position.max()) >= flat.numel()):
            raise InterpretError(
                f"load: {name}[{index}] reaches {int(position.min())}..{int(position.max())} of {flat.numel()} elements"
            )
        return position

    def store(self, name: str, index: sympy.Expr, value: torch.Tensor) -> None:
        position = self._checked(name, index)
        shape = torch.broadcast_shapes(position.shape, value.shape)
        flat = self.memory.flat[name]
        flat[position.expand(shape).reshape(-1)] = value.expand(shape).reshape(-1).to(flat.dtype)

    def scalar(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        value = self.scalars[name]
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64).to(dtype)

    def constant(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(evaluate(expr, self.symbols)).to(dtype)

    def indirect(self, value: torch.Tensor, size: sympy.Expr, what: str) -> sympy.Expr:
        extent_ = int(size)
        value = value.long()
        wrapped = torch.where(value < 0, value + extent_, value)
        outside = (wrapped < 0) | (wrapped >= extent_)
        if self._mask is not None:
            outside = outside & self._mask
        if bool(outside.any()):
            if what.startswith(VALUE_CHECK):
                raise RuntimeError(what.removeprefix(VALUE_CHECK))
            bad = int(torch.broadcast_to(value, outside.shape)[outside][0])
            raise IndexError(f"{what}: index {bad} is out of range for a dimension of size {extent_}")
        symbol = axis(f"indirect{len(self.symbols)}", extent_)
        self.symbols[symbol] = wrapped
        return symbol

    def masked(self, condition: torch.Tensor, body: Callable[[], torch.Tensor], other: float) -> torch.Tensor:
        outer = self._mask
        self._mask = condition if outer is None else outer & condition
        value = body()
        self._mask = outer
        return torch.where(condition, value, torch.tensor(other, dtype=value.dtype))

    def to_dtype(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype).float() if dtype in HALVES else value.to(dtype)

    def bitcast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.contiguous().view(dtype)

    def random_bits(self, seed: torch.Tensor, stream: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(seed.shape, stream.shape, counter.shape)
        seed_, stream_, counter_ = (x.long().expand(shape).contiguous().numpy() for x in (seed, stream, counter))
        return torch.from_numpy(philox_words(seed_, stream_, counter_).reshape(tuple(shape)))


def philox_words(seed: np.ndarray, stream: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Word 0 of Philox4x32-10 as int32, for int64 arrays of one shape."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    key, c = seed.astype(np.uint64), counter.astype(np.uint64)
    k0, k1, c0, c1 = key & low, key >> shift, c & low, c >> shift
    c2, c3 = stream.astype(np.uint64) & low, np.zeros_like(c)
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(WEYL[0])) & low, (k1 + np.uint64(WEYL[1])) & low
    return c0.astype(np.uint32).view(np.int32)


def _run_loop(node: LoopNode, memory: Memory, scalars: Mapping[str, Any], handler_type: type[EvalHandler]) -> None:
    index, reduce_index = node_index(node)
    sizes = ints(node.ranges + node.reduce_ranges)
    symbols: dict[sympy.Symbol, Any] = {}
    for position, (symbol, size) in enumerate(zip(index + reduce_index, sizes, strict=True)):
        if symbol.is_Symbol:
            along = [1] * len(sizes)
            along[position] = size
            symbols[symbol] = torch.arange(size).reshape(along)
    handler = handler_type(memory, scalars, symbols)
    value = node.body(handler, index, reduce_index)
    results = [torch.as_tensor(value).expand(sizes)]
    if node.reduction is not None:
        results = reduce_values(results[0], node, len(node.ranges))
    for output, result in zip(node.outputs, results, strict=True):
        memory.allocate(output)
        store = EvalHandler(memory, scalars, _without_reduce_axes(symbols, index))
        store.store(output.name, output.element(index), result)


def _without_reduce_axes(symbols: Mapping[sympy.Symbol, Any], index: tuple[sympy.Expr, ...]) -> dict[sympy.Symbol, Any]:
    rank = len(index)
    return {s: symbols[s].reshape(symbols[s].shape[:rank]) for s in index if s.is_Symbol}


def reduce_values(value: torch.Tensor, node: LoopNode, rank: int) -> list[torch.Tensor]:
    """The outputs of a reduction node from the body's values over all its points."""
    assert node.accumulate_dtype is not None, "a reduction states its accumulator"
    kept = value.shape[:rank]
    count = int(np.prod(value.shape[rank:], dtype=np.int64))
    flat = value.reshape(*kept, count).to(node.accumulate_dtype)
    match node.reduction:
        case "sum":
            return [flat.sum(-1, dtype=flat.dtype)]
        case "prod":
            return [flat.prod(-1, dtype=flat.dtype)]
        case "max":
            return [flat.amax(-1)]
        case "min":
            return [flat.amin(-1)]
        case "argmax":
            return [flat.argmax(-1)]
        case "argmin":
            return [flat.argmin(-1)]
        case "any":
            return [flat.bool().any(-1)]
        case "all":
            return [flat.bool().all(-1)]
        case "welford":
            mean = flat.mean(-1)
            return [mean, (flat - mean.unsqueeze(-1)).square().sum(-1), torch.full_like(mean, float(count))]
    raise InterpretError(f"reduction: {node.reduction!r} is no ReductionKind")


def _run_extern(node: ExternNode, memory: Memory, scalars: Mapping[str, Any]) -> None:
    def resolve(value: Any) -> Any:
        if isinstance(value, BufferRef):
            return scalars[value.name] if value.scalar else memory.tensors[value.name]
        if isinstance(value, (tuple, list)):
            return [resolve(item) for item in value]
        return value

    kwargs = {key: resolve(value) for key, value in node.kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    results = node.op(*(resolve(arg) for arg in node.args), **kwargs)
    results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    for output, result in zip(node.outputs, results, strict=True):
        if output is None:
            continue
        if tuple(result.shape) != ints(output.shape) or result.dtype != output.dtype:
            raise InterpretError(
                f"{node.op}: output {output.name} is {output.meta} in the graph, but the call gave "
                f"{result.dtype}{list(result.shape)}"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(result.shape, ints(output.strides), strict=True)):
            memory.bind(output, result)  # an expanded view, which nobody writes to
        else:
            memory.allocate(output).copy_(result)
