"""Primitives that are one ATen call each, of the set or outside of it.

Invariant: operands are handed over in the layout of their metadata, results come in the layout of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torchlazy.inductor.ir import Buffer, BufferRef
from torchlazy.inductor.lowerings.context import Context, Result
from torchlazy.inductor.lowerings.value import LoweredValue, buffer_value
from torchlazy.prims.meta import ScalarMeta, TensorMeta
from torchlazy.prims.ops import Prim


def lower_extern(context: Context, node: fx.Node, values: Mapping[fx.Node, Result]) -> Result:
    """The call with references for its tensors and runtime scalars."""

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if isinstance(value.meta["val"], ScalarMeta):
                return BufferRef(value.name, scalar=True)
            operand = values[value]
            assert isinstance(operand, LoweredValue)
            return context.operand_ref(operand)
        if isinstance(value, (tuple, list)):
            return tuple(argument(item) for item in value)
        return value

    prim = node.target
    assert isinstance(prim, Prim) and prim.overload is not None
    aten_args, aten_kwargs = prim.aten_call(node.args, node.kwargs)
    args = tuple(argument(arg) for arg in aten_args)
    kwargs = {key: argument(value) for key, value in aten_kwargs.items()}
    metas = node.meta["val"]
    several = isinstance(metas, (tuple, list))
    outputs = tuple(_output(context, meta) for meta in (metas if several else (metas,)))
    context.emit_extern(prim.overload, args, kwargs, outputs, node.name)
    results = tuple(None if output is None else buffer_value(output) for output in outputs)
    return results if several else results[0]  # type: ignore[return-value]


def _output(context: Context, meta: TensorMeta | None) -> Buffer | None:
    return None if meta is None else context.new_buffer(meta, device=meta.device)
