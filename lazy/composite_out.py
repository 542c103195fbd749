"""`out=` of operators that torch composes in C++, relying there on what ordinary tensors alone have.

`matmul` asks whether two tensors share a storage object, `kron` writes through a result that is no declared view,
`linalg.matrix_rank` forgets its `out` for tensor subclasses. Here they are the functional operator and a copy.
Invariant: the tensor passed as `out=` is what is returned, resized and checked as eager does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.op_plan import OpPlan
from torchlazy.lazy.recorder import Recorder

aten = torch.ops.aten
_KEEP: list[torch.library.Library] = []

# Each with whether eager wants the result's very dtype; else it casts, where that loses no kind of number.
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
    """In torch the copies that it is made of look for gradients; recorded whole, it must look itself."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (args[0], *kwargs["out"])):
        raise RuntimeError("unbind_copy(): functions with out=... arguments don't support automatic differentiation")
    return NotImplemented


def install(recorder: Recorder) -> None:
    """Put these kernels above autograd, and, for inference mode, into the recorder's table."""
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
