"""How to record an operator (its `OpPlan`), read once from its schema.

Invariant: a plan depends on the operator alone. An operator whose effect cannot be expressed functionally gets the
kind "eager": the recorder cuts the trace and runs it eagerly, which is always right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchlazy.lazy.trace.number_arguments import names_followed
from torchlazy.lazy.trace.trace import CutTrace, Entry, plain_constant
from torchlazy.prims.drawn_dropout import takes_random_numbers

Kind = Literal["pure", "view", "inplace", "out", "composite", "eager"]

# Scalars that programs vary from step to step (learning rates, bias corrections, decay): they become inputs of the
# compiled program, so that a new value compiles nothing. Exponents and epsilons stay constants: they choose code.
_VARYING_SCALARS: dict[str, frozenset[str]] = {
    name: frozenset(arguments)
    for names, arguments in (
        (("add", "sub", "rsub"), ("other", "alpha")),
        (("mul", "div", "true_divide"), ("other",)),
        (("addcmul", "addcdiv"), ("value",)),
        (("lerp",), ("weight",)),
        (("fill", "full", "full_like"), ("value", "fill_value")),
        (("clamp", "clamp_min", "clamp_max"), ("min", "max")),
        (("_foreach_add", "_foreach_sub"), ("scalar", "scalars", "alpha")),
        (("_foreach_mul", "_foreach_div"), ("scalar", "scalars")),
        (("_foreach_addcmul", "_foreach_addcdiv"), ("value", "scalars")),
        (("_foreach_lerp",), ("weight", "scalars")),
        (("_fused_adam", "_fused_adamw", "_fused_sgd"), ("lr", "weight_decay", "momentum")),
        (("_fused_adagrad",), ("lr", "lr_decay", "weight_decay")),
    )
    for name in names
}

# Operators that return their argument's value as it is; autograd and modules call them all the time.
IDENTITY_OPS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})

# Operators with wrong schemas: they return memory of an argument, or write to one, without declaring it.
_UNDECLARED_EFFECTS = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten.cudnn_batch_norm.default,
        torch.ops.aten.miopen_batch_norm.default,
    }
)
_MAKES_QUANTIZED = frozenset(
    {
        "quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel",
        "_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor",
        "_empty_affine_quantized", "_empty_per_channel_affine_quantized",
    }
)  # fmt: skip


@functools.cache
def is_random(op: Any) -> bool:
    """Whether an overload draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def draws(entry: Entry) -> bool:
    """Whether the operator takes numbers from a generator: attention does with a dropout that is not 0.0."""
    if not is_random(entry.op):
        return False
    named = {name: plain_constant(value) for name, value in entry.kwargs}
    return takes_random_numbers(entry.op, list(map(plain_constant, entry.args)), named)


def draws_at_run_time(trace: CutTrace) -> bool:
    """Whether an operator draws from a device's own generator when it runs (attention with dropout)."""
    return any(map(draws, trace.entries))


@dataclass(frozen=True, slots=True, eq=False)
class OpPlan:
    """How to record one operator.

    `functional` computes the new values of the arguments `written` (positions in the schema) without writing, then
    the operator's own results where it has any. `varying` are the argument names whose floats are program inputs,
    `followed` (at `followed_positions`) those that are so within a captured call that follows the number; `base` is the
    operator's name without its namespace, and without the mark of an in-place form. `is_list_write`: it writes to the
    tensors of its first argument, and eager's kernels count these writes; torch itself does so for single tensors only.
    """

    op: torch._ops.OpOverload
    kind: Kind
    functional: torch._ops.OpOverload
    written: tuple[int, ...]
    varying: frozenset[str]
    varying_positions: frozenset[int]
    names: tuple[str, ...]
    reason: str = ""
    followed: frozenset[str] = frozenset()
    followed_positions: frozenset[int] = frozenset()
    base: str = ""
    is_list_write: bool = False


def plan_of(op: torch._ops.OpOverload) -> OpPlan:
    """The operator's plan, read from its schema."""
    schema = op._schema
    arguments = schema.arguments
    names = tuple(a.name for a in arguments)
    base = schema.name.removeprefix("aten::")
    functional_base = base
    if base.startswith("__i") and base.endswith("__"):
        functional_base = "__" + base[3:]  # __ior__ -> __or__
    elif base.endswith("_") and not base.endswith("__"):
        functional_base = base[:-1]
    varying = _VARYING_SCALARS.get(functional_base, frozenset())

    def build(kind: Kind, functional: torch._ops.OpOverload, written: tuple[int, ...], reason: str = "") -> OpPlan:
        positions = frozenset(i for i, name in enumerate(names) if name in varying)
        followed = names_followed(functional_base)
        places = frozenset(i for i, name in enumerate(names) if name in followed)
        return OpPlan(
            op, kind, functional, written, varying, positions, names, reason, followed, places,
            functional_base, base.startswith("_foreach_") and written == (0,),
        )  # fmt: skip

    written = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return build("composite", op, written, "made of other operators")
    if op in _UNDECLARED_EFFECTS:
        return build("eager", op, written, "writes to its arguments without saying so")
    if base in _MAKES_QUANTIZED:
        return build("eager", op, written, "a quantized tensor")
    if torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags:
        return build("eager", op, written, "data-dependent shape")
    if not written:
        returns = schema.returns
        if not returns or any("Tensor" not in str(r.type) for r in returns):
            return build("eager", op, written, "does not return tensors")
        if any(r.alias_info is not None for r in returns):
            return build("view", op, written)
        if is_random(op):
            return build("eager", op, written, "random")
        return build("pure", op, written)
    functional = _functional_of(op, functional_base, written)
    if functional is None or is_random(op):
        return build("eager", op, written, "no functional form")
    if any(a.is_out for a in arguments):
        return build("out", functional, written)
    return build("inplace", functional, written)


def _functional_of(op: torch._ops.OpOverload, base: str, written: tuple[int, ...]) -> torch._ops.OpOverload | None:
    """The overload that accepts the same inputs and returns what `op` writes, or None."""
    packet = getattr(getattr(torch.ops, op.namespace), base, None)
    if packet is None:
        return None
    arguments = op._schema.arguments
    inputs = [a for a in arguments if not a.is_out]
    for overload in sorted(packet.overloads(), key=lambda name: name != op._overloadname):
        candidate = getattr(packet, overload)
        schema = candidate._schema
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
            continue
        if len(schema.arguments) != len(inputs) or len(schema.returns) < 1:
            continue
        if all(
            str(a.type) == str(b.type) and a.name == b.name for a, b in zip(schema.arguments, inputs, strict=True)
        ) and _result_tensors(schema.returns) >= len(written):
            return candidate
    return None


def _result_tensors(returns: list[torch._C.Argument]) -> int:
    return sum("Tensor" in str(r.type) for r in returns)
