"""`torch.autocast("lazy", dtype=...)`: the casts that CUDA's autocast makes, on the lazy device.

torch has no autocast key for the device type Lazy. Lazy tensors therefore carry the autocast key of the unused
PrivateUse1 backend, the kernels here are registered on that key for the operators that cast, every other operator falls
through, and `torch.autocast` and its queries are patched so that "lazy" means that key.

Invariant: with autocast off, nothing here is on any path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY
from torchlazy.lazy.torch_private.patches import teach_autocast

_KEY = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # the stub lacks this key
_KEEP: list[torch.library.Library] = []

# The lists are CUDA's, which tests/lazy/test_autocast.py checks against torch itself.
LOWER_PRECISION = (
    "matmul", "einsum", "mm", "bmm", "mv", "addmm", "addmv", "addr", "addbmm", "baddbmm", "linear",
    "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "conv1d", "conv2d", "conv3d", "conv1d.padding",
    "conv2d.padding", "conv3d.padding", "convolution", "_convolution", "_convolution.deprecated", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "prelu",
    "scaled_dot_product_attention", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "norm.Scalar", "norm.ScalarOpt_dim", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "upsample_nearest1d", "_upsample_nearest_exact1d",
    "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "cross_entropy_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add", "cat", "stack",
)  # fmt: skip


def _is_castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device == LAZY
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_castable(value):
        return value if value.dtype == dtype else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _floats(values: Any) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _floats(value)
        elif _is_castable(value):
            found.append(value.dtype)
    return found


def _lower(args: Any, kwargs: Any) -> torch.dtype | None:
    return torch.get_autocast_dtype("lazy")


def _float32(args: Any, kwargs: Any) -> torch.dtype | None:
    return None if kwargs.get("dtype") is not None else torch.float32


def _widest(args: Any, kwargs: Any) -> torch.dtype | None:
    dtypes = _floats((*args, *kwargs.values()))
    if len(set(dtypes)) < 2:
        return None
    return torch.float32 if torch.float32 in dtypes else dtypes[0]


def _kernel(op: torch._ops.OpOverload, choose: Callable[[Any, Any], torch.dtype | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            dtype = choose(args, kwargs)
            if dtype is not None:
                args = tuple(_cast(a, dtype) for a in args)
                kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return op(*args, **kwargs)

    return kernel


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe to autocast."
    )


def install(recorder: Recorder) -> None:
    """Register the casting kernels and let `torch.autocast` accept "lazy"."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for names, choose in ((LOWER_PRECISION, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, base, None)
            if packet is not None and (overload or "default") in packet.overloads():
                library.impl(name, _kernel(getattr(packet, overload or "default"), choose), "AutocastPrivateUse1")
    library.impl("binary_cross_entropy", _banned, "AutocastPrivateUse1")
    _KEEP.extend((everything, library))
    teach_autocast("lazy", torch.bfloat16, lambda: recorder.lazy_type())
