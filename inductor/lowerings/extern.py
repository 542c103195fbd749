"""Extern primitives: one ATen call each.

Invariant: operands are handed over in the layout of their metadata, results come in the layout of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torchlazy.inductor.ir import Buffer, Ref
from torchlazy.inductor.lowerings.context import Context, Result
from torchlazy.inductor.lowerings.value import Value, buffer_value
from torchlazy.prims.meta import ScalarMeta, TensorMeta


def lower_extern(context: Context, node: fx.Node, values: Mapping[fx.Node, Result]) -> Result:
    """The call with references for its tensors and runtime scalars."""

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if isinstance(value.meta["val"], ScalarMeta):
                return Ref(value.name, scalar=True)
            operand = values[value]
            assert isinstance(operand, Value)
            return context.operand_ref(operand)
        if isinstance(value, (tuple, list)):
            return tuple(argument(item) for item in value)
        return value

    args = tuple(argument(arg) for arg in node.args)
    kwargs = {key: argument(value) for key, value in node.kwargs.items()}
    metas = node.meta["val"]
    several = isinstance(metas, (tuple, list))
    outputs = tuple(_output(context, meta) for meta in (metas if several else (metas,)))
    context.emit_extern(node.target.overload, args, kwargs, outputs, node.name)  # type: ignore[union-attr, arg-type]
    results = tuple(None if output is None else buffer_value(output) for output in outputs)
    return results if several else results[0]  # type: ignore[return-value]


def _output(context: Context, meta: TensorMeta | None) -> Buffer | None:
    return None if meta is None else context.new_buffer(meta, device=meta.device)
