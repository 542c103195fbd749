"""Shape inference of one operator call: by our rules (shapes/registry.py), else by torch's meta or fake kernels.

Meta kernels are used where they run the same code that shapes eager's results. Fake kernels are rewritten in Python for
many operators, and give sizes of 1 other strides. `check_by_running` finds calls whose dtypes only the real kernel
refuses.

Invariant: what is run on the meta device here is a view or an elementwise operator on tensors of one device. Nothing
here is on the hot path; the recorder caches what `infer` returns by operator, input geometry and constants.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torchlazy.lazy.deferred import fake_mode
from torchlazy.lazy.shapes import creation, foreach, nn, pointwise
from torchlazy.lazy.shapes.refusals import is_refused, mask_rank
from torchlazy.lazy.shapes.registry import infer_by_rule
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.geometry import Geometry, geometry, is_dense, kind_of

aten = torch.ops.aten

# Fake kernels give other strides here than the real ones, which use the memory format of this argument on the CPU;
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


def to_meta(value: Any) -> Any:
    """The value with tensors on the meta device in place of geometries."""
    if type(value) is Geometry:
        span = torch.empty_strided((value.span,), (1,), dtype=value.dtype, device="meta")
        return span.as_strided(value.shape, value.strides, value.offset)
    if isinstance(value, (list, tuple)):
        return [to_meta(item) for item in value]
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
    return with_real_strides(op, _norm_dtypes(op, result, args), args)


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
    """Torch's own rule accepts bfloat16 only, the CPU's kernel float32, too. Rows begin at every 16 bytes."""
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


def _rnn_layer(*args: Any) -> tuple[Any, ...]:
    """Without gradients (the 16th argument, as it is recorded) the kernel gives no workspace; torch's rule does."""
    output, hidden, cell, workspace = aten.mkldnn_rnn_layer.default(*args)
    return output, hidden, cell, workspace if args[15] else None


def _cudnn_attention(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The kernel gives no log-sum-exp where none is asked for (the fifth argument); torch's rule does."""
    out, logsumexp, *rest = aten._scaled_dot_product_cudnn_attention.default(*args, **kwargs)
    asked = args[4] if len(args) > 4 else kwargs["compute_log_sumexp"]
    return out, logsumexp if asked else None, *rest


def _batch_norm_backward(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The kernels give no gradient of the input where the mask (the tenth argument) omits it; torch's rule does."""
    gradient, *others = op(*args, **kwargs)
    mask = args[9] if len(args) > 9 else kwargs["output_mask"]
    return gradient if mask[0] else None, *others


_OWN: dict[Any, Any] = {
    **{
        op: functools.partial(_batch_norm_backward, op)
        for op in (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
    },
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
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


def with_real_strides(op: torch._ops.OpOverload, result: Any, args: Any) -> Any:
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
    """Channels last where a tensor of images or volumes has that layout, and is not row-major, too."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # it logs what it raises, which is expected here
_ABOUT_DTYPES = re.compile(
    "not implemented for|not yet implemented|dtype|scalar type|data type|floating point|bool tensor|bool input|complex"
    "|without overflow|attempted to promote|input type|a long tensor|(?i:boolean (input|tensor))"
)
_TAKES_PIVOTS = frozenset({"lu_unpack", "lu_solve", "linalg_lu_solve", "linalg_ldl_solve"})
_CALLED_BY_USERS = frozenset(
    {
        "_softmax", "_log_softmax", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_fft_r2c",
        "_fft_c2r", "_fft_c2c", "_native_batch_norm_legit_functional", "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa", "_embedding_bag", "_safe_softmax",
    }
)  # fmt: skip
_NUMBERS = frozenset({bool, int, float, complex})
_LARGEST_HALF = 65504
_CHECKED: set[tuple[Any, ...]] = set()
_MAX_CHECKED = 16384
_FEW = 1 << 20  # elements
_USUAL = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8}
)
RULES = (  # importing them registers them
    nn, foreach, creation, nn, pointwise, creation,
    creation
)  # fmt: skip


class CannotInfer(Exception):
    """The operator's result depends on data, or its fake kernel is missing: run it for real."""


def fake_of(geom: Geometry) -> torch.Tensor:
    """A tensor without data that has this geometry; call it under the fake mode."""
    span = torch.empty_strided((geom.span,), (1,), dtype=geom.dtype, device=geom.compute)
    return span.as_strided(geom.shape, geom.strides, geom.offset)


def _fakes(value: Any) -> Any:
    if type(value) is Geometry:
        return fake_of(value)
    if isinstance(value, (list, tuple)):
        return [_fakes(item) for item in value]
    return value


def _geometries(value: Any, device: torch.device, compute: str) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_dense(value):
            raise CannotInfer(f"the result is a {kind_of(value)} tensor")
        if any(not isinstance(n, int) for n in value.shape):
            raise CannotInfer("the result's shape depends on data")
        found = compute if value.device.type == "meta" else str(value.device)
        claimed = device if found == compute else value.device
        return geometry(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, claimed, found)
    if isinstance(value, (list, tuple)):
        return tuple(_geometries(item, device, compute) for item in value)
    if value is None or type(value) is int:
        return value  # an int beside tensors is a size that the operator returns (attention's lengths)
    raise CannotInfer(f"the result is a {type(value).__name__}, not a tensor")


def infer(
    op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], device: torch.device, compute: str
) -> tuple[Any, Any]:
    """Geometry of the results of `op` and of its arguments afterwards (they change for `resize_` and `out=`).

    `args` and `kwargs` hold a Geometry in place of each tensor. Results on `compute` claim to be on `device`.
    Raises CannotInfer where torch's fake kernel does not know; the caller then runs the operator for real, which also
    yields eager's own error for a bad call.
    """
    if is_refused(op, args, kwargs):
        raise CannotInfer(f"{op}: eager refuses these shapes")
    known = infer_by_rule(op, args, kwargs, device, compute)
    if known is not None:
        return known
    if shapes_like_eager(op, args, kwargs, compute):
        try:
            with torch.no_grad(), _quiet_about_resizing(op):
                given, named = to_meta(list(args)), {n: to_meta(v) for n, v in kwargs.items()}
                return _inferred(op(*given, **named), given, named, device, compute)
        except NotImplementedError:  # no meta kernel
            pass
        except Exception as error:  # eager's own; the fake kernel lets some pass (a view across a dimension of size 1)
            raise CannotInfer(f"{op}: {type(error).__name__}: {error}") from error
    was_disabled, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        with fake_mode(), torch.no_grad(), _quiet_about_resizing(op):
            fake_args, fake_kwargs = _fakes(list(args)), {name: _fakes(v) for name, v in kwargs.items()}
            result = run_fake(op, fake_args, fake_kwargs)
    except Exception as error:
        if type(error).__name__ == "UnsupportedOperatorException":
            raise CannotInfer(f"{op}: torch tells the shape of its result only by running it") from error
        raise CannotInfer(f"{op}: {type(error).__name__}: {error}") from error
    finally:
        _FAKE_LOG.disabled = was_disabled
    return _inferred(result, fake_args, fake_kwargs, device, compute)


def _has_masks(op: torch._ops.OpOverload, args: Any) -> bool:
    """Whether it writes as many values as masks have true elements, which only the data decide."""
    return "index_put" in op._schema.name and isinstance(args[1], list) and any(map(mask_rank, args[1]))


@contextlib.contextmanager
def _quiet_about_resizing(op: torch._ops.OpOverload) -> Iterator[None]:
    """Suppress warnings of meta kernels about an `out=` or in-place target of another size; the real call warns."""
    if not op._schema.is_mutable:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _inferred(result: Any, args: Any, kwargs: dict[str, Any], device: torch.device, compute: str) -> tuple[Any, Any]:
    """Geometry of the results and of the arguments afterwards."""
    after = _geometries_or_constants(args, device, compute)
    named = {name: _geometries_or_constants(value, device, compute) for name, value in kwargs.items()}
    return _geometries(result, device, compute), (after, named)


def _geometries_or_constants(value: Any, device: torch.device, compute: str) -> Any:
    if isinstance(value, torch.Tensor):
        return _geometries(value, device, compute)
    if isinstance(value, list):
        return [_geometries_or_constants(item, device, compute) for item in value]
    return value


def check_by_running(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], compute: str) -> None:
    """Raises CannotInfer where the real operator refuses these dtypes, or empty tensors: fake kernels often do not.

    Runs it on a few zeros in each tensor's place, once for each operator and its dtypes; shapes are checked by `infer`.
    Operators that users do not call (`_ctc_loss_backward`) trust their arguments: they may read beyond such a tensor.
    """
    if _has_masks(op, args):
        return  # zeros hold no place for a value
    name = op._schema.name.removeprefix("aten::")
    is_inner = name.startswith("_") and not name.startswith("__") and name not in _CALLED_BY_USERS
    is_inner = is_inner or "backward" in name
    is_inner = is_inner or name.startswith("mkldnn")  # its recurrent layers get sizes as arguments, and write by them
    if op.namespace != "aten" or is_inner or compute != "cpu":
        return  # a kernel with bad arguments can break a GPU's whole context: there such errors wait for the cut
    values = (*args, *kwargs.values())
    geoms = [g for v in values for g in (v if isinstance(v, list) else (v,)) if type(g) is Geometry]
    is_empty = any(not g.numel for g in geoms)
    narrow = any(not g.dtype.is_floating_point and g.dtype.itemsize < 8 for g in geoms)
    numbers = [_decisive_value(v, 127 if narrow else _LARGEST_HALF) for v in values if type(v) in _NUMBERS]
    dtypes = () if geoms else tuple(v for v in values if isinstance(v, torch.dtype) and v not in _USUAL)
    key = (op, *((g.dtype, len(g.shape)) for g in geoms), *dtypes, *numbers)
    if not (geoms or dtypes) or (key in _CHECKED and not is_empty):
        return

    whole = is_empty
    side = 3 if name == "linalg_cross" else 2  # not one element: kernels skip some checks on dimensions of 1

    def zeros(value: Any) -> Any:
        if type(value) is Geometry:
            shape = value.shape if whole else (side,) * len(value.shape)
            # Ones: pivots of factorisations count from one, and are not checked.
            made = torch.ones if name in _TAKES_PIVOTS and value.dtype == torch.int32 else torch.zeros
            return made(shape, dtype=value.dtype, device=value.compute)
        if not geoms and type(value) is int:  # how much of an unusual dtype is made from nothing
            return min(value, 2)
        return [zeros(item) for item in value] if isinstance(value, list) else value

    def target(value: Any) -> Any:  # empty: kernels warn when they resize a tensor with elements
        if type(value) is Geometry:
            return torch.empty(0, dtype=value.dtype, device=value.compute)
        return [target(item) for item in value] if isinstance(value, list) else value

    outs = {a.name for a in op._schema.arguments if a.is_out}

    def error_of_the_call() -> Exception | None:
        try:
            with below_autograd(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                op(*[zeros(a) for a in args], **{n: (target if n in outs else zeros)(v) for n, v in kwargs.items()})
        except Exception as error:
            return error.with_traceback(None)  # whose frames would keep the caller's tensors alive
        return None

    error = error_of_the_call()
    about_dtypes = whole or isinstance(error, NotImplementedError) or _ABOUT_DTYPES.search(str(error))
    if error is not None and not about_dtypes and _is_unusual(geoms):
        whole = True  # the few zeros had a wrong shape
        error = error_of_the_call()
    if error is not None and (whole or about_dtypes):
        raise CannotInfer(f"{op}: {error}") from error
    if is_empty:
        return  # kernels take empty tensors of dtypes that they refuse otherwise
    if len(_CHECKED) >= _MAX_CHECKED:
        _CHECKED.clear()  # numbers that keep changing must not fill the memory
    _CHECKED.add(key)


def _is_unusual(geoms: list[Geometry]) -> bool:
    """Whether these dtypes are likely to be refused, and few enough elements to try it."""
    mixed = len({g.dtype for g in geoms}) > 1 or not all(g.dtype.is_floating_point for g in geoms)
    return mixed and sum(g.numel for g in geoms) <= _FEW


def _decisive_value(number: complex, harmless: int) -> Any:
    """What of a number decides whether it is refused: its type; beyond what every dtype holds, the number itself."""
    if isinstance(number, complex):
        return complex, bool(number.imag)
    if abs(number) <= harmless:
        return type(number)
    return number.hex() if isinstance(number, float) else number  # NaN too, which equals nothing
