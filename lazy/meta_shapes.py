"""Geometry of results from meta kernels, where those run the very code that shapes eager's results.

Fake kernels are written anew in Python for many operators, and give sizes of 1 other strides.
Invariant: what is asked of the meta device here is a view or an elementwise operator on tensors of one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.geometry import Geometry

aten = torch.ops.aten

# Fake kernels give other strides here than the real ones, which take the memory format of this argument on the CPU;
# on a GPU the first of these is contiguous.
_FORMAT_ON_CPU: dict[torch._ops.OpOverload, int] = {
    aten.max_unpool2d.default: 0,
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
}
# Norms whose kernels on the CPU keep the statistics in the parameters' dtype; their fakes keep them in the input's.
_NORMS = frozenset({
    aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
})  # fmt: skip


def shapes_like_eager(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], compute: str) -> bool:
    """Whether `run_on_meta` gives eager's strides for this call."""
    returns = op._schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    if not is_view and torch.Tag.pointwise not in op.tags:
        return False
    return all(_is_on(compute, value) for value in (*args, *kwargs.values()))


def _is_on(compute: str, value: Any) -> bool:
    if type(value) is Geometry:
        return value.compute == compute
    if isinstance(value, (list, tuple)):
        return all(_is_on(compute, item) for item in value)
    return not isinstance(value, (torch.device, torch.Generator))


def metas(value: Any) -> Any:
    """Tensors on the meta device in the place of geometries."""
    if type(value) is Geometry:
        span = torch.empty_strided((value.span,), (1,), dtype=value.dtype, device="meta")
        return span.as_strided(value.shape, value.strides, value.offset)
    if isinstance(value, (list, tuple)):
        return [metas(item) for item in value]
    return value


def run_fake(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """The fake result of `op`, with the strides that the real kernel gives; call it under the fake mode."""
    try:
        if (position := _LIKE_AN_ARGUMENT.get(op)) is not None:
            return args[position].new_empty(args[position].shape)
        result = _OWN.get(op, op)(*args, **kwargs)
    except RuntimeError as why:
        if type(why).__name__ != "UnsupportedOperatorException" or not _returns_what_it_writes(op):
            raise
        return _as_written(op, args, kwargs)
    return laid_out(op, _norm_dtypes(op, result, args), args)


def _returns_what_it_writes(op: torch._ops.OpOverload) -> bool:
    """Whether it is a fused optimizer's step, some of which torch has no rule for: results are `name_out` of `name`."""
    names = {argument.name for argument in op._schema.arguments}
    return all(found.name.endswith("_out") and found.name[:-4] in names for found in op._schema.returns)


def _as_written(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    found = [given[result.name[:-4]] for result in op._schema.returns]
    made = [[torch.empty_like(x) for x in value] if isinstance(value, (list, tuple)) else torch.empty_like(value)
            for value in found]  # fmt: skip
    return tuple(made) if len(made) > 1 else made[0] if made else None


def _norm_dtypes(op: torch._ops.OpOverload, result: Any, args: Any) -> Any:
    """The results with the dtypes of the CPU's kernels where an input in half precision meets parameters in float32."""
    if op in _NORMS:
        x, *others = args
        if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
            return result
        if any(isinstance(other, torch.Tensor) and other.dtype == torch.float32 for other in others):
            out, mean, rstd, *running = result
            return (out, mean.float(), rstd.float(), *running)
    elif op is aten.native_group_norm_backward.default and result[0] is not None and args[1].device.type == "cpu":
        return (result[0].to(args[1].dtype), *result[1:])
    return result


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Torch's own rule refuses all but bfloat16, the CPU's kernel takes float32 too. Rows begin at every 16 bytes."""
    is_known = (
        a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and out_dtype in (None, torch.float32)
        and bias is None
        and a.dim() in (2, 3)
        and b.dim() in (2, 3)
        and a.shape[-1] == b.shape[-2]
        and (offs is None) == (a.dim() == b.dim() == 3)
        and (offs is not None or a.shape[0] == b.shape[0])
        and all(s == 1 or s % 4 == 0 for t in (a, b) for s in t.stride())
    )
    if not is_known:
        return aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    rows, columns = a.shape[-2], b.shape[-1]
    step = -(-columns // 4) * 4
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (step, 1), dtype=a.dtype, device=a.device)
    groups = a.shape[0] if offs is None else offs.shape[0]
    return torch.empty_strided((groups, rows, columns), (rows * step, step, 1), dtype=a.dtype, device=a.device)


def _geqrf(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch has no rule: reflectors by columns, and a factor for each."""
    if x.dim() < 2:
        raise NotImplementedError("geqrf: eager refuses less than two dimensions")
    *batch, rows, columns = x.shape
    return x.new_empty((*batch, columns, rows)).mT, x.new_empty((*batch, min(rows, columns)))


def _multilabel_margin(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own rule gives the unreduced loss of a single row one dimension of size 1, its kernels give it none."""
    loss, marks = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    return (loss if target.dim() > 1 else x.new_empty(())), marks


def _multi_margin(
    x: torch.Tensor, target: torch.Tensor, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    """As above, where a single target has no dimension."""
    loss: torch.Tensor = aten.multi_margin_loss.default(x, target, p, margin, weight, reduction)
    return loss if target.dim() else x.new_empty(())


_OWN: dict[Any, Any] = {
    aten.multi_margin_loss.default: _multi_margin,
    aten._grouped_mm.default: _grouped_mm,
    aten.geqrf.default: _geqrf,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
}
# Torch has no rule: a row-major result with the sizes and the dtype of the argument at this position.
_LIKE_AN_ARGUMENT: dict[Any, int] = {
    aten.multi_margin_loss_backward.default: 1, aten.multilabel_margin_loss_backward.default: 1,
    aten.fractional_max_pool3d_backward.default: 1, aten._ctc_loss_backward.default: 1,
    aten._ctc_loss_backward.Tensor: 1, aten._standard_gamma_grad.default: 0, aten._dirichlet_grad.default: 0,
}  # fmt: skip


def laid_out(op: torch._ops.OpOverload, result: Any, args: Any) -> Any:
    """`result` with the strides that the real kernel gives it; call it under the mode that made it."""
    if op is aten.im2col.default:
        return result.contiguous()
    position = _FORMAT_ON_CPU.get(op)
    if position is None:
        return result
    if args[position].device.type != "cpu":
        return result.contiguous() if op is aten.max_unpool2d.default else result
    chosen = _memory_format(args[position])
    if isinstance(result, torch.Tensor):
        return result.contiguous(memory_format=chosen)
    first, *rest = result
    return (first if first is None else first.contiguous(memory_format=chosen), *rest)


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last where a tensor of images or volumes lies so and not row-major too."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last
