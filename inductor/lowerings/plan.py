"""Which values of a graph go into memory, decided before any is lowered.

A value that all its consumers inline into one loop node costs nothing twice (a body computes it once), so what counts
is in how many loop nodes it would stand: its sinks. Walking the graph backwards, a node's sinks are its users that are
realized and the sinks of those that are not. A value with several sinks is stored unless `choices.recompute` says that
computing it again is as cheap as loading it.

Invariant: the plan is advice on cost only; rules put into memory what they need there whatever it says.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torchlazy.inductor import choices
from torchlazy.inductor.analyses import HEAVY_OPS, work_of
from torchlazy.inductor.choices import ChainCost
from torchlazy.inductor.index import reshape_strides
from torchlazy.inductor.lowerings.value import count, same_layout
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.ops import Kind, Prim
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE
from torchlazy.prims.size_int import hint

_WINDOW_VIEWS = ("reshape", "permute", "expand", "slice", "as_strided")
_INDEX_MAPS = (*_WINDOW_VIEWS, "flip")


@dataclass(frozen=True)
class LoweringPlan:
    """Nodes by name. `stored`: compute into memory when lowered; `fixed`: in the layout of the metadata, since an
    extern call or the caller reads it (others may lie as suits them); `reasons` tell why, for dumps."""

    stored: frozenset[str]
    fixed: frozenset[str]
    reasons: dict[str, str]


def plan_realization(graph: fx.Graph) -> LoweringPlan:
    """Decide for every node of a prims graph."""
    return _LoweringPlanner(graph).plan()


class _LoweringPlanner:
    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.costs: dict[fx.Node, ChainCost] = {}  # of the recipe
        self.inlined: dict[fx.Node, ChainCost] = {}  # what a consumer pays: less where the value is stored, most likely
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the values in memory that a recipe reads
        self.reasons: dict[fx.Node, str] = {}
        self.fixed: set[fx.Node] = set()
        self.evaluated: dict[fx.Node, float] = {}  # elements that loops compute, were the value inlined everywhere
        self.uniform: set[fx.Node] = set()  # one number in every element, made of numbers alone

    def plan(self) -> LoweringPlan:
        self._require_memory()
        for node in self.nodes:
            self._estimate(node)
        self._share()
        return LoweringPlan(
            frozenset(node.name for node in self.reasons),
            frozenset(node.name for node in self.fixed),
            {node.name: reason for node, reason in self.reasons.items()},
        )

    # --- what must lie in memory ---

    def _require_memory(self) -> None:
        """Outputs and operands of extern calls, through views that keep a window."""
        for node in reversed(self.nodes):
            if node.op == "output":
                for result in node.all_input_nodes:
                    self._require(result, "output")
            elif is_extern(node):
                for operand in node.all_input_nodes:
                    self._require(operand, f"operand of {node.name}")
            elif node in self.fixed and _keeps_window(node):
                # An output that is a view is stored by itself unless its base is in memory anyway.
                if self.reasons[node] != "output" or is_stored_by_nature(node.args[0]):
                    del self.reasons[node]
                    self._require(node.args[0], f"seen through {node.name}")
            elif name_of(node) in ("as_strided", "as_strided_scatter"):
                self._require(node.args[0], f"laid out for {node.name}")

    def _require(self, node: object, reason: str) -> None:
        assert isinstance(node, fx.Node)
        if isinstance(node.meta.get("val"), TensorMeta):
            self.fixed.add(node)
            self.reasons.setdefault(node, reason)

    # --- what inlining costs ---

    def _estimate(self, node: fx.Node) -> None:
        meta = node.meta.get("val")
        if not isinstance(meta, TensorMeta):
            return
        if is_stored_by_nature(node) or node in self.reasons:
            self._estimate_stored(node, meta)
            return
        prim = node.target
        assert isinstance(prim, Prim)
        operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        sources = frozenset().union(*(self.sources[arg] for arg in operands))
        own = 0 if prim.name in _INDEX_MAPS or prim.is_kind(Kind.CREATION) else work_of(prim.name)
        work = own + sum(self.inlined[arg].work for arg in operands)
        heavy = (prim.name in HEAVY_OPS) + sum(self.inlined[arg].heavy for arg in operands)
        if prim.name == "expand" and _growth(operands[0], node) >= choices.MIN_HOIST_GROWTH:
            work = heavy = 0  # done once a row, not once an element: a kernel keeps it outside of its loop
        if self._is_uniform(node, prim, operands):
            self.uniform.add(node)
            work = heavy = 0  # done once a kernel
        self.sources[node] = sources
        cost = self.costs[node] = self.inlined[node] = self._cost(meta, sources, work, heavy)
        is_shared = len(node.users) > 1 and prim.name not in _INDEX_MAPS and node not in self.uniform
        if is_shared and not choices.recompute(cost, hint(count(meta.shape)), self._itemsize(node), 2, meta.device):
            self._estimate_stored(node, meta)
            self.costs[node] = cost

    def _is_uniform(self, node: fx.Node, prim: Prim, operands: list[fx.Node]) -> bool:
        """Numbers of the program, such as what an optimizer makes of its learning rate: kernels compute them anew.

        In memory they would be read by the kernels of all parameters, which would fuse over that, each group its own.
        """
        if prim.name == "full":
            return True
        is_map = prim.is_kind(Kind.POINTWISE) or prim.name in _INDEX_MAPS
        return is_map and bool(operands) and all(operand in self.uniform for operand in operands)

    def _estimate_stored(self, node: fx.Node, meta: TensorMeta) -> None:
        self.sources[node] = frozenset((node,))
        self.costs[node] = self.inlined[node] = self._cost(meta, self.sources[node], 0, 0)

    def _cost(self, meta: TensorMeta, sources: frozenset[fx.Node], work: int, heavy: int) -> ChainCost:
        size = hint(count(meta.shape))
        read = 0.0
        for source in sources:
            numel = hint(count(source.meta["val"].shape))
            share = numel / size if isinstance(size, int) and size and isinstance(numel, int) else 1.0
            read += self._itemsize(source) * min(1.0, share)
        reduced = any(is_reduction(source) for source in sources)
        return ChainCost(work, heavy, read, len(sources), reduced)

    def _itemsize(self, node: fx.Node) -> int:
        """Bytes of one element, should the value be stored."""
        return int((node.meta["val"].dtype if node in self.fixed else memory_dtype_of(node)).itemsize)

    # --- who stands in how many kernels ---

    def _share(self) -> None:
        sinks: dict[fx.Node, frozenset[object]] = {}
        for node in reversed(self.nodes):
            if not isinstance(node.meta.get("val"), TensorMeta):
                continue
            found: set[object] = set()
            for user in node.users:
                found.update(self._sinks_of_user(user, sinks))
            is_free = not is_stored_by_nature(node)
            if is_free and node not in self.reasons:
                reason = self._reason_to_store(node, len(found))
                if reason:
                    self.reasons[node] = reason
            self.evaluated[node] = self._evaluations(node)
            if is_free and node not in self.reasons:
                reason = self._reason_to_store_repeated(node)
                if reason:
                    self.reasons[node] = reason
            # A realized node hands its consumers one sink: its own loop.
            sinks[node] = frozenset((node,)) if node in self.reasons else frozenset(found)

    def _sinks_of_user(self, user: fx.Node, sinks: dict[fx.Node, frozenset[object]]) -> frozenset[object]:
        if user.op == "output":
            return frozenset((user,))
        if name_of(user) in ("welford", "logsumexp"):  # two passes over their operand
            return frozenset((user, (user, "second pass")))
        if is_stored_by_nature(user) or user.target is operator.getitem:
            return frozenset((user,))
        return sinks[user]

    def _evaluations(self, node: fx.Node) -> float:
        """How many elements of the value loops compute: one body computes each index once, so readers at the same
        index count once, readers through shifted views each for itself."""
        size = _numel(node)
        same = moved = 0.0
        for user in node.users:
            name = name_of(user)
            if user.op == "output" or not isinstance(user.meta.get("val"), TensorMeta) or is_stored_by_nature(user):
                same = max(same, size)
                continue
            read = _numel(user) if user in self.reasons else self.evaluated[user]
            part = read * size / max(1.0, _numel(user))
            if name in ("slice", "flip"):
                moved += read
            elif name == "expand" and any(name_of(reader) == "reshape" for reader in user.users):
                moved += read  # repeated along a merged axis: nothing is hoisted out of that loop
            elif name in ("pad", "expand"):
                moved += part
            elif name in ("gather", "index"):
                moved += read if user.args[0] is node else 0.0
                same = max(same, size if node in user.args[1:] else 0.0)
            else:
                same = max(same, part if name == "cat" else read)
        return same + moved

    def _reason_to_store_repeated(self, node: fx.Node) -> str:
        """Overlapping windows read one value at several places: work that is not light is done once, in memory."""
        if name_of(node) in (*_INDEX_MAPS, "pad", "cat") or node in self.uniform:
            return ""
        numel = hint(count(node.meta["val"].shape))
        times = self.evaluated[node] / max(1.0, _numel(node))
        if times < choices.MIN_REPEATED_READS:
            return ""
        cost = self.costs[node]
        if choices.recompute(cost, numel, self._itemsize(node), int(times), node.meta["val"].device):
            return ""
        return f"computed {times:.0f} times in one loop"

    def _reason_to_store(self, node: fx.Node, kernels: int) -> str:
        if name_of(node) in _INDEX_MAPS or node in self.uniform:
            return ""  # a view is read through, and costs nothing: its base decides
        cost, meta = self.costs[node], node.meta["val"]
        numel = hint(count(meta.shape))
        if kernels > 1 and not choices.recompute(cost, numel, self._itemsize(node), kernels, meta.device):
            return f"read by {kernels} loops"
        for user in node.users:
            name = name_of(user)
            is_source = name in ("gather", "index") and user.args[0] is node
            gathered = hint(count(user.meta["val"].shape)) if is_source else 0
            if is_source and choices.gather_source_in_memory(cost, numel, gathered):
                return f"indexed by {user.name}"
            if name == "expand" and choices.hoist(cost, _growth(node, user), numel == 1):
                return f"expanded by {user.name}"
        return ""


def _numel(node: fx.Node) -> float:
    return float(hint(count(node.meta["val"].shape)))


def name_of(node: object) -> str:
    """The primitive's name; empty for what is no primitive."""
    target = node.target if isinstance(node, fx.Node) else None
    return target.name if isinstance(target, Prim) else ""


def memory_dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype that the value of a node may have in memory: graph passes tell where ATen would have rounded it."""
    return node.meta.get(MEMORY_DTYPE, node.meta["val"].dtype)


def is_extern(node: fx.Node) -> bool:
    """Whether the node is one ATen call."""
    return isinstance(node.target, Prim) and node.target.is_kind(Kind.EXTERN)


def is_reduction(node: fx.Node) -> bool:
    """Whether the node is a reduction or one of its results."""
    if node.target is operator.getitem:
        return is_reduction(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, Prim) and node.target.is_kind(Kind.REDUCTION)


def is_stored_by_nature(node: object) -> bool:
    """Whether the value lies in memory by what it is: an input, an extern call's or a reduction's result."""
    assert isinstance(node, fx.Node)
    if node.op == "placeholder":
        return True
    target = node.target
    return is_stored_by_nature(node.args[0]) if target is operator.getitem else _is_in_memory(target)


@cache
def _is_in_memory(target: Any) -> bool:
    """Whether the results of a call are by nature in memory."""
    if not isinstance(target, Prim):
        return False
    return target.name == "as_strided" or target.is_kind(Kind.EXTERN) or target.is_kind(Kind.REDUCTION)


def _keeps_window(node: fx.Node) -> bool:
    """Whether the node is a view whose layout is a window on its operand laid out by its metadata."""
    name = name_of(node)
    if name not in _WINDOW_VIEWS:
        return False
    if name != "reshape":
        return True
    source: TensorMeta = node.args[0].meta["val"]  # type: ignore[union-attr]
    meta: TensorMeta = node.meta["val"]
    strides = reshape_strides(source.shape, source.strides, meta.shape)
    return strides is not None and same_layout(meta.shape, strides, meta.strides)


def _growth(source: fx.Node, expanded: fx.Node) -> float:
    return hint(count(expanded.meta["val"].shape)) / max(1, hint(count(source.meta["val"].shape)))
