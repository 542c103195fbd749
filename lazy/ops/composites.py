"""Composite operators with rules of their own: attention, `one_hot`, and `out=` forms that torch composes in C++.

`scaled_dot_product_attention` stays one operator. For a device that torch does not know it would use its composite
form: about 23 recorded operators, with the scores in memory. The fused ATen operators are differentiable, so the
backward is one operator too.

`one_hot` is a write at one position per row, which raises eager's type of error at the cut. Torch's own form for
devices whose numbers it must not read is a comparison with a range, where a class out of range silently gives a row of
zeros.

Some `out=` forms rely on what only ordinary tensors have: `matmul` tests whether two tensors share a storage object,
`kron` writes through a result that is no declared view, `linalg.matrix_rank` ignores its `out` for tensor subclasses.
Here they are the functional operator and a copy.

Invariant: the tensor passed as `out=` is what is returned, resized and checked as eager does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.trace.op_schema import OpPlan

aten = torch.ops.aten
_KEEP: list[torch.library.Library] = []
_HALVES = (torch.float16, torch.bfloat16)


def attention(
    recorder: Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(query key^T scale + mask) value; (batch, heads, length, width) tensors as in torch."""
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    ranks = [tensor.dim() for tensor in (query, key, value)]
    if min(ranks) < 2:
        raise RuntimeError(
            f"Expected query, key and value to all be at least 2 dimensional, but got dims {ranks} instead."
        )
    if enable_gqa and query.dim() == 4 and key.size(-3) != query.size(-3):
        repeat = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(repeat, -3), value.repeat_interleave(repeat, -3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the operators below add the mask
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    fused = None
    if is_plain_case(query, key, value):
        compute = query.device.type
        if isinstance(query, LazyTensor):  # values of another target move to the current one
            compute = recorder.target if query._geometry.device == LAZY else query._geometry.compute
        if compute == "cpu":
            fused = _on_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale)
        elif compute.startswith("cuda"):
            fused = _on_cuda(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if fused is not None:
        return fused
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
    )[0]


def is_plain_case(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Four dimensions, one dtype and width, nothing empty: what the fused operators accept."""
    tensors = (query, key, value)
    return (
        all(t.dim() == 4 and t.numel() > 0 and t.dtype == query.dtype for t in tensors)
        and query.dtype in (torch.float32, torch.float64, *_HALVES)
        and query.size(-1) == key.size(-1) == value.size(-1)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and all(t.stride(-1) == 1 for t in tensors)
    )


def _on_cpu(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, causal: bool, scale: float | None) -> Any:
    if dropout_p > 0 or (mask is not None and (mask.requires_grad or mask.dim() not in (2, 4))):
        return None
    if mask is not None and mask.dtype != q.dtype:
        return None
    return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)[
        0
    ]


def _on_cuda(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, causal: bool, scale: float | None) -> Any:
    width = q.size(-1)
    square = q.size(-2) == k.size(-2)  # the flash kernel aligns a causal mask at the last keys, torch at the first
    if mask is None and q.dtype in _HALVES and width % 8 == 0 and width <= 256 and (square or not causal):
        return aten._scaled_dot_product_flash_attention.default(q, k, v, dropout_p, causal, False, scale=scale)[0]
    if q.dtype == torch.float64 or width % 4 or (mask is not None and mask.requires_grad):
        return None
    bias = None
    if mask is not None:
        length = k.size(-2)
        bias = _aligned_rows(mask.to(q.dtype), length).expand(q.size(0), q.size(1), q.size(2), length)
    needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return aten._scaled_dot_product_efficient_attention.default(
        q, k, v, bias, needs_backward, dropout_p, causal, scale=scale
    )[0]


def _aligned_rows(mask: torch.Tensor, length: int) -> torch.Tensor:
    """The mask for so many keys as the kernel needs it: dense rows that begin at multiples of 16 elements."""
    mask = mask.expand(*mask.shape[:-1], length)
    if length % 16:
        rows = mask.clone(memory_format=torch.contiguous_format)  # pads keep channels last, which (1, C, 1, 1) may be
        return torch.nn.functional.pad(rows, (0, -length % 16))[..., :length]
    starts = [mask.storage_offset(), *(mask.stride(i) for i in range(mask.dim() - 1) if mask.size(i) > 1)]
    is_aligned = mask.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return mask if is_aligned else mask.clone(memory_format=torch.contiguous_format)


_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
)


def draws_when_it_runs(op: Any) -> bool:
    """Whether `op` is recorded though it is random: its program draws, from the compute device's generator."""
    return op.name().removeprefix("aten::") in _FUSED


def install_attention(recorder: Recorder) -> None:
    """Keep attention one operator: a kernel above autograd for the lazy device, and a handler in the recorder."""

    def above_autograd(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(recorder, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", above_autograd, "AutogradLazy")
    _KEEP.append(library)

    def recorded(rec: Recorder, plan: Any, args: Any, kwargs: Any) -> Any:
        return attention(rec, *args, **kwargs)

    whole = aten.scaled_dot_product_attention.default
    recorder.handlers[whole] = recorded
    recorder.unrecorded[id(whole)] = above_autograd
    for name in _FUSED:
        # Tagged as random because of its dropout; recorded all the same: with dropout it draws from the compute
        # device's generator when it runs, in the order of the program.
        overload = getattr(aten, name).default
        recorder.handlers[overload] = lambda rec, plan, args, kwargs: rec.record_pure(plan.op, args, kwargs)


def one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """int64 [*classes.shape, num_classes]: 1 at each class, 0 elsewhere; -1 classes: as many as the largest needs.

    `classes` int64 of any shape. Raises RuntimeError for another dtype, at the cut for a class out of range.
    """
    if classes.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to an index tensor of type LongTensor, not of {classes.dtype}")
    if num_classes <= 0 or not classes.numel():
        return aten.one_hot.default.decompose(classes, num_classes).contiguous()  # it compares: laid out as the classes
    zeros = torch.zeros((*classes.shape, num_classes), dtype=torch.int64, device=classes.device)
    return zeros.scatter(-1, classes.unsqueeze(-1), 1)


def under_a_mode(_: Any, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`torch.nn.functional.one_hot` of any tensor inside `lazy_mode`, where torch compares, too."""
    return one_hot(tensor, num_classes)


def install_one_hot(recorder: Recorder) -> None:
    """A kernel above autograd for the lazy device."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("one_hot", one_hot, "AutogradLazy")
    _KEEP.append(library)


_SHUFFLE = aten.native_channel_shuffle.default


def channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """`native_channel_shuffle` of x (batch, channels, ...); of no elements, where torch's composite has sizes left to
    guess, a copy, as the kernels give."""
    if x.numel() or x.dim() < 3 or groups < 1 or x.shape[1] % groups:
        return _SHUFFLE.decompose(x, groups)  # type: ignore[no-any-return]
    return x.clone()


def install_channel_shuffle(recorder: Recorder) -> None:
    """A kernel above autograd for the lazy device, and one in the recorder's table."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("native_channel_shuffle", channel_shuffle, "AutogradLazy")
    _KEEP.append(library)
    recorder.handlers[_SHUFFLE] = lambda rec, plan, args, kwargs: channel_shuffle(*args, **kwargs)


# Each with whether eager requires the result's exact dtype; else it casts where `torch.can_cast` allows.
_OPERATORS: dict[torch._ops.OpOverload, bool] = {
    aten.matmul.out: True,
    aten.kron.out: False,
    aten.linalg_matrix_rank.out: False,
    aten.linalg_matrix_rank.out_tol_tensor: False,
    aten.linalg_matrix_rank.atol_rtol_tensor_out: False,
    aten.linalg_matrix_rank.atol_rtol_float_out: False,
}


def write_out(out: torch.Tensor, value: torch.Tensor, exact_dtype: bool, name: str) -> torch.Tensor:
    """`out` with `value` in it: resized (with a warning where it held elements), cast where eager casts.

    Raises RuntimeError where the dtypes do not fit.
    """
    if value.dtype != out.dtype and (exact_dtype or not torch.can_cast(value.dtype, out.dtype)):
        raise RuntimeError(f"{name}: the result is {value.dtype}, which out= of {out.dtype} cannot take")
    if out.shape != value.shape:
        if out.numel():
            warnings.warn(
                f"{name}: out= was resized from shape {list(out.shape)} to {list(value.shape)}; pass an empty tensor, "
                "or one of the result's shape",
                stacklevel=2,
            )
        out.resize_(value.shape)
    return out.copy_(value)


def _kernel(op: torch._ops.OpOverload, exact_dtype: bool) -> Callable[..., Any]:
    packet = getattr(aten, op._schema.name.removeprefix("aten::"))
    name = op._schema.name.removeprefix("aten::")

    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return _computed(packet, args, kwargs, out, exact_dtype, name)

    return run


def _computed(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: torch.Tensor, exact_dtype: bool, name: str
) -> torch.Tensor:
    tensors = [t for t in (*args, *kwargs.values(), out) if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    with torch.no_grad():
        return write_out(out, function(*args, **kwargs), exact_dtype, name)


def _function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(_: Any, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if out is None:
            return function(*args, **kwargs)
        return _computed(function, args, kwargs, out, False, name)

    return run


# The same for calls on ordinary tensors under `lazy_mode`, by torch's function.
UNDER_A_MODE: dict[Any, Callable[..., Any]] = {
    function: _function(function, name)
    for function, name in ((torch.kron, "kron"), (torch.linalg.matrix_rank, "linalg_matrix_rank"))
}


def _unbind_copy(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In torch its copies check for gradients; recorded as one operator, it must check itself."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (args[0], *kwargs["out"])):
        raise RuntimeError("unbind_copy(): functions with out=... arguments don't support automatic differentiation")
    return NotImplemented


def install_out_forms(recorder: Recorder) -> None:
    """Register these kernels above autograd, and, for inference mode, in the recorder's table."""
    library = torch.library.Library("aten", "IMPL")
    for op, exact_dtype in _OPERATORS.items():
        kernel = _kernel(op, exact_dtype)

        def handler(
            rec: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any], kernel: Any = kernel
        ) -> Any:
            return kernel(*args, **kwargs)

        recorder.handlers[op] = handler
        library.impl(op.name().removeprefix("aten::"), kernel, "AutogradLazy")
    recorder.handlers[aten.unbind_copy.int_out] = _unbind_copy
    _KEEP.append(library)
