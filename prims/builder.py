"""The rule table and the builder of prims graphs, with which decomposition rules are written.

A rule is `fn(b, *args, **kwargs) -> Node | tuple[Node | None, ...] | None`, called with every argument of the ATen
schema (defaults filled in; positional ones by position, keyword-only ones by name). Tensors and runtime scalars are
Nodes of the graph under construction, lists are tuples, the rest is plain Python. None, or raising NotApplicable, means
"call ATen for this one"; ExternByChoice says that ATen's kernel is the better one.

Invariant: every node that the builder makes has meta "val", "frame" and "origin", and its val is what the primitive's
metadata rule says, up to strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from torch import fx
from torchlazy.prims import host_calls, meta_infer, ops
from torchlazy.prims.attrs import is_runtime_scalar
from torchlazy.prims.errors import ExternByChoice, MetaError, NotApplicable, RuleError
from torchlazy.prims.fallback import Fallback
from torchlazy.prims.meta import Dim, ScalarMeta, TensorMeta, ValueMeta, contiguous_strides
from torchlazy.prims.promotion import broadcast_shapes, compute_dtype, is_integral, result_dtype, why_not_computed
from torchlazy.prims.rule_memo import RuleMemo, replayed
from torchlazy.prims.schema_form import bind
from torchlazy.prims.size_int import is_tracked, same_sizes

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)
Promotion = Literal["default", "int_to_float", "bool_result", "no_promotion"]

RULES: dict[torch._ops.OpOverload, Rule] = {}
# These only say where an element of memory lies, whatever its dtype.
ANY_DTYPE_PRIMS = frozenset({ops.permute, ops.expand, ops.slice})
# Why an overload has no rule, where that is on purpose: reported in place of "no rule".
EXTERN_REASONS: dict[torch._ops.OpOverload, str] = {}


def rule(*overloads: torch._ops.OpOverload | str) -> Callable[[R], R]:
    """Register a decomposition rule for ATen overloads.

    A string "name.overload" is looked up in torch.ops.aten and ignored where this torch does not have it.
    """

    def register(fn: R) -> R:
        for overload in overloads:
            found = _lookup(overload) if isinstance(overload, str) else overload
            if found is None:
                continue
            if found in RULES:
                raise ValueError(f"{found} has two rules: {RULES[found].__name__} and {fn.__name__}; delete one")
            RULES[found] = fn
        return fn

    return register


def _lookup(text: str) -> torch._ops.OpOverload | None:
    name, _, overload = text.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


@dataclass
class _Scope:
    """One rule being run."""

    overload: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: ValueMeta | None


class Builder:
    """Appends primitives to `graph`. One builder serves one `decompose` run."""

    def __init__(self, graph: fx.Graph, *, strict: bool = False) -> None:
        self.graph = graph
        self.strict = strict  # raise where a rule fails, instead of falling back to extern
        self.fallbacks: list[Fallback] = []
        self.frame = ""
        self.origin = ""
        self.stage = ""  # the side of a training step that the ATen call was recorded on, if known
        self.accelerator = ""  # "cuda:0" where the graph has values there
        self.window_numbers: dict[fx.Node, tuple[fx.Node, Any]] = {}  # of max pooling's positions: see max_pooling.py
        self._scopes: list[_Scope] = []
        self._created: dict[fx.Node, None] = {}
        self._memo: RuleMemo | None = None  # of the calls that are not part of a remembered one
        self._erased = 0

    # --- what is known of values ---

    @property
    def wanted(self) -> Any:
        """The TensorMeta (or tuple) of the ATen result that the running rule stands for."""
        scope = self._scopes[-1]
        if scope.wanted is None:
            scope.wanted = self._infer(scope.overload, scope.args, scope.kwargs)
        return scope.wanted

    def meta(self, x: fx.Node) -> TensorMeta:
        """The metadata of a tensor node."""
        return x.meta["val"]

    def shape(self, x: fx.Node) -> tuple[Dim, ...]:
        """The shape of a tensor node."""
        return x.meta["val"].shape

    def dtype(self, x: fx.Node) -> torch.dtype:
        """The dtype of a tensor node."""
        return x.meta["val"].dtype

    def is_tensor(self, x: object) -> TypeGuard[fx.Node]:
        """Whether `x` is a tensor node (and not a number or a runtime scalar)."""
        return isinstance(x, fx.Node) and isinstance(x.meta["val"], TensorMeta)

    # --- making nodes ---

    def prim(self, prim: ops.Prim, *operands: Any, **attrs: Any) -> Any:
        """One primitive on tensor nodes; a tuple of nodes where it has several results.

        Numbers and runtime scalars among the operands of an elementwise primitive become constants like the last tensor
        operand (so `b.prim(ops.where, condition, x, 0.0)` means x's dtype).
        """
        nodes = self._operands(operands)
        if (
            prim not in ANY_DTYPE_PRIMS
            and prim.overload is None
            and (reason := why_not_computed(attrs.get("dtype", torch.bool), *map(self.dtype, nodes)))
        ):
            raise NotApplicable(reason)
        metas = [node.meta["val"] for node in nodes]
        value = prim.meta(*metas, **attrs)
        if prim.overload is not None:  # lies as ATen lays it
            value = meta_infer.retrack(self._infer(prim.overload, *prim.aten_call(nodes, attrs)), value, metas)
        return self._append(prim, tuple(nodes), attrs, value)

    def extern(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """The ATen operator called as it is, on purpose (not counted as a fallback)."""
        return self._call(overload, args, kwargs, self._infer(overload, args, kwargs))

    def extern_laid(self, wanted: ValueMeta, overload: torch._ops.OpOverload, *args: Any) -> Any:
        """As `extern`, where it is known how the results lie (a library may choose the layout as it runs)."""
        return self._call(overload, args, {}, wanted)

    def aten(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """The ATen operator, decomposed by its own rule."""
        return self.apply(overload, args, kwargs, None)

    def _operands(self, operands: tuple[Any, ...]) -> list[fx.Node]:
        like = next((x for x in reversed(operands) if self.is_tensor(x)), None)
        nodes = []
        for x in operands:
            if not self.is_tensor(x):
                if like is None:
                    raise MetaError(f"operands {operands} hold no tensor to take shape and dtype from")
                x = self.full_like(like, x)
            nodes.append(x)
        return nodes

    def _append(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: ValueMeta
    ) -> Any:
        return self._unpack(self._node(target, args, kwargs, value), value)

    def _unpack(self, node: fx.Node, value: Any) -> Any:
        """The parts of a node with several results, which may be lists themselves."""
        if not isinstance(value, tuple):
            return node
        return tuple(
            None if item is None else self._unpack(self._node(operator.getitem, (node, i), {}, item), item)
            for i, item in enumerate(value)
        )

    def _node(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: ValueMeta
    ) -> fx.Node:
        return self._again(target, args, kwargs, {"val": value})

    # --- small words of the language of rules ---

    def full(self, shape: tuple[Dim, ...], value: Any, dtype: torch.dtype, device: str | None = None) -> fx.Node:
        """A constant (number or runtime scalar) of that shape and dtype; device: that of the wanted result."""
        if device is None:
            wanted = self.wanted
            device = (wanted[0] if isinstance(wanted, tuple) else wanted).device
        if isinstance(value, complex):
            raise NotApplicable("complex number")
        return self.prim(ops.full, shape=tuple(shape), value=value, dtype=dtype, device=device)

    def full_like(self, x: fx.Node, value: Any, dtype: torch.dtype | None = None) -> fx.Node:
        """A constant of x's shape, device and dtype (or another dtype)."""
        meta = self.meta(x)
        return self.full(meta.shape, value, dtype or meta.dtype, meta.device)

    def convert(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """x in another dtype; x itself where it has that dtype."""
        if self.dtype(x) == dtype:
            return x
        if reason := why_not_computed(dtype, self.dtype(x)):
            raise NotApplicable(reason)
        return self.prim(ops.convert, x, dtype=dtype)

    def reshape(self, x: fx.Node, shape: tuple[Dim, ...]) -> fx.Node:
        """x with another shape; x itself where it has that shape. No -1."""
        return x if self.shape(x) == tuple(shape) else self.prim(ops.reshape, x, shape=tuple(shape))

    def permute(self, x: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """Dimension i of the result is dimension dims[i] of x; x itself for the identity."""
        dims = tuple(d % len(dims) for d in dims)
        return x if dims == tuple(range(len(dims))) else self.prim(ops.permute, x, dims=dims)

    def slice(self, x: fx.Node, axis: int, start: Dim, stop: Dim, step: Dim = 1) -> fx.Node:
        """x[start:stop:step] along one axis, 0 <= start <= stop <= size; x itself where nothing is cut off."""
        shape = self.shape(x)
        if same_sizes((start, stop, step), (0, shape[axis], 1)):  # type: ignore[arg-type]
            return x
        starts, stops, steps = [0] * len(shape), list(shape), [1] * len(shape)
        starts[axis], stops[axis], steps[axis] = start, stop, step
        return self.prim(ops.slice, x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))

    def unsqueeze(self, x: fx.Node, axis: int) -> fx.Node:
        """A new dimension of size 1 at `axis` (0 <= axis <= rank)."""
        shape = self.shape(x)
        return self.reshape(x, (*shape[:axis], 1, *shape[axis:]))

    def broadcast(self, x: fx.Node, shape: tuple[Dim, ...]) -> fx.Node:
        """x repeated to `shape` as torch broadcasts; x itself where it has that shape."""
        old, shape = self.shape(x), tuple(shape)
        if len(old) == len(shape) and old == shape:  # tuples of other lengths would compare their sizes first
            return x
        if len(old) > len(shape):
            raise MetaError(f"shape {old} does not broadcast to {shape}")
        if x.target is ops.full and x in self._created:
            return self.prim(ops.full, **{**x.kwargs, "shape": shape})
        x = self.reshape(x, (1,) * (len(shape) - len(old)) + old)
        return x if self.shape(x) == shape else self.prim(ops.expand, x, shape=shape)

    def to_device(self, x: fx.Node, device: str) -> fx.Node:
        """x on another device: an extern copy; x itself where it is there."""
        if self.meta(x).device == device:
            return x
        return self.extern(torch.ops.aten._to_copy.default, x, device=torch.device(device))

    def result(self, x: fx.Node, meta: TensorMeta) -> fx.Node:
        """x converted and broadcast to what `meta` says."""
        return self.broadcast(self.convert(x, meta.dtype), meta.shape)

    def promote(
        self, *operands: Any, kind: Promotion = "default", widen: bool = True, round_numbers: bool = True
    ) -> tuple[list[fx.Node], torch.dtype]:
        """`(operands, result dtype)`: tensors, runtime scalars and numbers in one shape and computation dtype.

        kind: "default" (the common dtype), "int_to_float" (integers become the default dtype), "bool_result"
        (computes in the common dtype, result bool), "no_promotion" (tensors must have one dtype; numbers take it).
        widen: compute halves in float32. Operands pass through the common dtype first, as ATen casts them, but without
        round_numbers numbers and 0-dim tensors go straight to the computation dtype. Complex ones raise NotApplicable.
        """
        tensors = [self.meta(x) for x in operands if self.is_tensor(x)]
        known = [x.meta["val"] if isinstance(x, fx.Node) else x for x in operands]
        if kind == "no_promotion" and tensors:
            common = tensors[0].dtype
            if any(meta.dtype != common for meta in tensors):
                raise NotApplicable(f"operands of dtypes {[str(meta.dtype) for meta in tensors]}")
        else:
            common = result_dtype(known)
        if reason := why_not_computed(common, *(meta.dtype for meta in tensors)):
            raise NotApplicable(reason)
        if kind == "int_to_float" and is_integral(common):
            common = torch.get_default_dtype()
        computed = compute_dtype(common) if widen else common
        shape = broadcast_shapes(meta.shape for meta in tensors)
        device = next((meta.device for meta in tensors if meta.rank), None)
        device = device or next((meta.device for meta in tensors if meta.device != "cpu"), None)
        device = device or (tensors[0].device if tensors else None)
        nodes = []
        for x in operands:
            if self.is_tensor(x):
                if not self.shape(x):
                    x = self.to_device(x, device or "cpu")
                if round_numbers or self.shape(x):
                    x = self.convert(x, common)
                nodes.append(self.broadcast(self.convert(x, computed), shape))
            elif round_numbers:
                nodes.append(self.convert(self.full(shape, x, common, device), computed))
            else:
                nodes.append(self.full(shape, x, computed, device))
        return nodes, torch.bool if kind == "bool_result" else common

    # --- running rules ---

    def remember(self, memo: RuleMemo) -> None:
        """From now on calls like earlier ones get copies of what those became."""
        self._memo = memo if memo.is_on else None

    def apply(
        self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: ValueMeta | None
    ) -> Any:
        """The values of one ATen call: by its rule, or as an extern where there is none or it does not apply.

        `wanted` is the ATen result's metadata: checked against the rule's result, its strides stamped on it.
        """
        memo = self._memo
        if memo is None or wanted is None or overload not in RULES:
            return self._apply(overload, args, kwargs, wanted)
        found = memo.key_of(overload, args, kwargs, wanted)
        if found is None or any(operand in self.window_numbers for operand in found[1]):
            return self._apply(overload, args, kwargs, wanted)
        key, operands = found
        known = memo.find(key)
        if known is not None:
            return replayed(known, operands, self._again)
        before, told = len(self._created), (len(self.fallbacks), len(self.window_numbers), self._erased)
        self._memo = None  # what this call is made of is remembered with it
        try:
            result = self._apply(overload, args, kwargs, wanted)
        finally:
            self._memo = memo
        if told == (len(self.fallbacks), len(self.window_numbers), self._erased):
            memo.keep(key, operands, reversed(self._created_since(before)), result)
        return result

    def _again(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], meta: dict[str, Any]
    ) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(meta, frame=self.frame, origin=self.origin)
        if self.stage:
            node.meta["stage"] = self.stage
        self._created[node] = None
        return node

    def _apply(
        self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: ValueMeta | None
    ) -> Any:
        if overload not in RULES:
            reason = EXTERN_REASONS.get(overload) or ops.why_library(overload)
            return self._fall_back(overload, args, kwargs, wanted, reason or "no rule", by_choice=reason is not None)
        if self.accelerator and host_calls.is_host_call((args, kwargs), wanted):
            reason = f"values on the host, in a program for {self.accelerator}"
            args, kwargs = host_calls.with_constants(self, (args, kwargs))
            return self._fall_back(overload, args, kwargs, wanted, reason, by_choice=True)
        by_choice = False
        before, reported = len(self._created), len(self.fallbacks)
        self._scopes.append(_Scope(overload, args, kwargs, wanted))
        try:
            positional, keywords = bind(overload, args, kwargs)
            result = RULES[overload](self, *positional, **keywords)
            if result is not None:
                result = self._finish(overload, result, wanted, before)
                return result
            reason = "the rule does not cover these arguments"
        except NotApplicable as error:
            reason, by_choice = str(error), isinstance(error, ExternByChoice)
        except Exception as error:
            if self.strict:
                raise
            reason = f"rule failed: {type(error).__name__}: {error}"
        finally:
            self._scopes.pop()
        self._erase(before)
        del self.fallbacks[reported:]
        return self._fall_back(overload, args, kwargs, wanted, reason, by_choice=by_choice)

    def _fall_back(
        self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
        wanted: ValueMeta | None, reason: str, *, by_choice: bool,
    ) -> Any:  # fmt: skip
        self.fallbacks.append(Fallback(str(overload), reason, self.frame, by_choice))
        value = self._tracked(overload, args, kwargs) if wanted is None else wanted
        return self._call(overload, tuple(args), dict(kwargs), value)

    def _tracked(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueMeta:
        """What torch infers of a call, with the tracked sizes that its primitive or its operands tell."""
        value = self._infer(overload, args, kwargs)
        operands = [x for x in (*args, *kwargs.values()) if self.is_tensor(x)]
        metas = [self.meta(x) for x in operands]
        if not any(is_tracked(size) for meta in metas for size in meta.shape):
            return value
        try:
            found = ops.library_form(overload, args, kwargs)
            if found is not None and all(map(self.is_tensor, found[1])):
                told = found[0].meta(*map(self.meta, found[1]), **found[2])
                return meta_infer.retrack(value, told, metas)
            if torch.Tag.pointwise in overload.tags and isinstance(value, TensorMeta):
                told = replace(value, shape=broadcast_shapes(meta.shape for meta in metas))
                return meta_infer.retrack(value, told, metas)
        except MetaError:
            pass
        return value

    def _call(
        self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: ValueMeta
    ) -> Any:
        """One ATen call: the primitive that stands for it, or, where the set has none for such arguments, an extern."""
        found = self._library_call(overload, args, kwargs, value)
        if found is None:
            return self._append(ops.extern(overload), args, kwargs, value)
        return self._append(*found, value)

    def _library_call(
        self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: ValueMeta
    ) -> tuple[ops.Prim, tuple[fx.Node, ...], dict[str, Any]] | None:
        try:
            found = ops.library_form(overload, args, kwargs)
            if found is None or not all(map(self.is_tensor, found[1])):
                return None
            prim, operands, attrs = found
            if isinstance(attrs.get("dim"), int):
                attrs["dim"] %= max(self.meta(operands[0]).rank, 1)
            inferred = prim.meta(*map(self.meta, operands), **attrs)
        except MetaError:
            return None  # mixed dtypes, broadcasting inside of the call, numbers that change from run to run
        return (prim, tuple(operands), attrs) if _is_same(inferred, value) else None

    def _infer(self, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueMeta:
        metas_args, metas_kwargs = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        return meta_infer.infer(overload, metas_args, metas_kwargs)

    def _created_since(self, before: int) -> list[fx.Node]:
        """The nodes made since there were `before` of them, last first; costs no more than their number."""
        return list(islice(reversed(self._created), len(self._created) - before))

    def _erase(self, before: int) -> None:
        for node in self._created_since(before):
            del self._created[node]
            self.graph.erase_node(node)
            self._erased += 1

    def _finish(self, overload: torch._ops.OpOverload, result: Any, wanted: ValueMeta | None, before: int) -> Any:
        if wanted is None:
            return result
        return self._finish_any(overload, result, wanted, dict.fromkeys(self._created_since(before)))

    def _finish_any(self, overload: torch._ops.OpOverload, result: Any, wanted: Any, made: dict[fx.Node, None]) -> Any:
        if wanted is None:
            return None
        if not isinstance(wanted, tuple):
            return self._finish_one(overload, result, wanted, made)
        if not isinstance(result, (tuple, list)) or len(result) != len(wanted):
            raise RuleError(f"{overload}: the rule returned {result}, ATen {len(wanted)} values")
        return tuple(self._finish_any(overload, x, meta, made) for x, meta in zip(result, wanted, strict=True))

    def _finish_one(
        self, overload: torch._ops.OpOverload, x: Any, wanted: TensorMeta | ScalarMeta, made: dict[fx.Node, None]
    ) -> fx.Node:
        if not isinstance(wanted, TensorMeta) or not self.is_tensor(x):
            raise RuleError(f"{overload}: the rule returned {x!r}, ATen {wanted}")
        meta = self.meta(x)
        if (meta.shape, meta.dtype, meta.device) != (wanted.shape, wanted.dtype, wanted.device):
            raise RuleError(f"{overload}: the rule returned {meta} on {meta.device}, ATen {wanted} on {wanted.device}")
        if x in made:
            made.pop(x)  # a second result that is the same node gets a copy if it is laid out otherwise
            x.meta["val"] = replace(meta, strides=wanted.strides)
            return x
        if is_same_layout(meta, wanted):
            return x
        copy = self.prim(ops.convert, x, dtype=meta.dtype)
        copy.meta["val"] = replace(meta, strides=wanted.strides)
        return copy


def is_same_layout(a: TensorMeta, b: TensorMeta) -> bool:
    """Whether two metas of one shape place every element alike; strides of sizes 0 and 1 do not count."""
    if any(size == 0 for size in a.shape):
        return True
    return all(size == 1 or s == t for size, s, t in zip(a.shape, a.strides, b.strides, strict=True))


def is_contiguous(meta: TensorMeta) -> bool:
    """Whether the elements lie in row-major order without gaps."""
    return is_same_layout(meta, replace(meta, strides=contiguous_strides(meta.shape)))


def _is_same(inferred: Any, value: Any) -> bool:
    """Whether the metadata that a primitive's rule gives is ATen's, up to strides."""
    if isinstance(value, tuple) or isinstance(inferred, tuple):
        parts = isinstance(value, tuple) and isinstance(inferred, tuple) and len(value) == len(inferred)
        return parts and all(map(_is_same, inferred, value))
    if inferred is None or value is None:
        return inferred is value
    return (inferred.shape, inferred.dtype, inferred.device) == (value.shape, value.dtype, value.device)


__all__ = [
    "EXTERN_REASONS", "RULES", "Builder", "ExternByChoice", "Fallback", "MetaError", "NotApplicable", "Promotion",
    "RuleError", "is_contiguous", "is_runtime_scalar", "is_same_layout", "rule",
]  # fmt: skip
