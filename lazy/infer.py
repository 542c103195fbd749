"""Result geometry of an operator: from our own rules (lazy/shape_rules.py), else from torch's meta and fake kernels.

Invariant: nothing here is on the hot path; the recorder caches what `infer` returns by operator, input geometry and
constants.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torchlazy.lazy import (
    meta_shapes,
    shape_rules_fft,
    shape_rules_foreach,
    shape_rules_new,
    shape_rules_nn,
    shape_rules_pointwise,
    shape_rules_quantize,
    shape_rules_rnn,
)
from torchlazy.lazy.call_checks import is_refused, mask_rank
from torchlazy.lazy.deferred import fake_mode
from torchlazy.lazy.geometry import Geometry, geometry, is_dense, kind_of
from torchlazy.lazy.shape_rules import told
from torchlazy.lazy.torch_private import below_autograd

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # it logs what it raises: no news of ours
_ABOUT_DTYPES = re.compile(
    "not implemented for|not yet implemented|dtype|scalar type|data type|floating point|bool tensor|bool input|complex"
    "|without overflow|attempted to promote|input type|a long tensor|(?i:boolean (input|tensor))"
)
_TAKES_PIVOTS = frozenset({"lu_unpack", "lu_solve", "linalg_lu_solve", "linalg_ldl_solve"})
_ASKED_BY_USERS = frozenset(
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
    shape_rules_fft, shape_rules_foreach, shape_rules_new, shape_rules_nn, shape_rules_pointwise, shape_rules_quantize,
    shape_rules_rnn
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
        return value  # an int beside tensors is a size that the operator tells (attention's lengths)
    raise CannotInfer(f"the result is a {type(value).__name__}, not a tensor")


def infer(
    op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], device: torch.device, compute: str
) -> tuple[Any, Any]:
    """Geometry of the results of `op` and of its arguments afterwards (they change for `resize_` and `out=`).

    `args` and `kwargs` hold a Geometry where a tensor stands. Results on `compute` claim to be on `device`.
    Raises CannotInfer where torch's fake kernel cannot tell; the caller then runs the operator for real, which also
    yields eager's own error for a bad call.
    """
    if is_refused(op, args, kwargs):
        raise CannotInfer(f"{op}: eager refuses these shapes")
    known = told(op, args, kwargs, device, compute)
    if known is not None:
        return known
    if meta_shapes.shapes_like_eager(op, args, kwargs, compute):
        try:
            with torch.no_grad(), _quiet_about_resizing(op):
                metas, named = meta_shapes.metas(list(args)), {n: meta_shapes.metas(v) for n, v in kwargs.items()}
                return _told(op(*metas, **named), metas, named, device, compute)
        except Exception:  # no meta kernel, or eager's own error, which the fake kernel is asked about too
            pass
    was_disabled, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        with fake_mode(), torch.no_grad(), _quiet_about_resizing(op):
            fake_args, fake_kwargs = _fakes(list(args)), {name: _fakes(v) for name, v in kwargs.items()}
            result = meta_shapes.run_fake(op, fake_args, fake_kwargs)
    except Exception as error:
        if type(error).__name__ == "UnsupportedOperatorException":
            raise CannotInfer(f"{op}: torch tells the shape of its result only by running it") from error
        raise CannotInfer(f"{op}: {type(error).__name__}: {error}") from error
    finally:
        _FAKE_LOG.disabled = was_disabled
    return _told(result, fake_args, fake_kwargs, device, compute)


def _has_masks(op: torch._ops.OpOverload, args: Any) -> bool:
    """A write of as many values as masks have places, which only the data tell."""
    return "index_put" in op._schema.name and isinstance(args[1], list) and any(map(mask_rank, args[1]))


@contextlib.contextmanager
def _quiet_about_resizing(op: torch._ops.OpOverload) -> Iterator[None]:
    """Meta kernels warn of an `out=` or in-place target of another size; what eager says of it, the real call says."""
    if not op._schema.is_mutable:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _told(result: Any, args: Any, kwargs: dict[str, Any], device: torch.device, compute: str) -> tuple[Any, Any]:
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

    Runs it on a few zeros in each tensor's place, once for each operator and its dtypes; shapes are `infer`'s business.
    Operators that users do not call (`_ctc_loss_backward`) trust their arguments: they may read beyond such a tensor.
    """
    if _has_masks(op, args):
        return  # zeros hold no place for a value
    name = op._schema.name.removeprefix("aten::")
    is_inner = name.startswith("_") and not name.startswith("__") and name not in _ASKED_BY_USERS
    is_inner = is_inner or "backward" in name
    is_inner = is_inner or name.startswith("mkldnn")  # its recurrent layers are told sizes, and write by them
    if op.namespace != "aten" or is_inner or compute != "cpu":
        return  # a kernel that dislikes its arguments can end a GPU's whole context: there such errors wait for the cut
    values = (*args, *kwargs.values())
    geoms = [g for v in values for g in (v if isinstance(v, list) else (v,)) if type(g) is Geometry]
    is_empty = any(not g.numel for g in geoms)
    narrow = any(not g.dtype.is_floating_point and g.dtype.itemsize < 8 for g in geoms)
    numbers = [_telling(v, 127 if narrow else _LARGEST_HALF) for v in values if type(v) in _NUMBERS]
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

    def target(value: Any) -> Any:  # of no elements: kernels warn of the others when they resize them
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
        _CHECKED.clear()  # numbers that change for ever must not fill the memory
    _CHECKED.add(key)


def _is_unusual(geoms: list[Geometry]) -> bool:
    """Whether these dtypes are likely to be refused, and few enough elements to try it."""
    mixed = len({g.dtype for g in geoms}) > 1 or not all(g.dtype.is_floating_point for g in geoms)
    return mixed and sum(g.numel for g in geoms) <= _FEW


def _telling(number: complex, harmless: int) -> Any:
    """What of a number decides whether it is refused: its type; beyond what every dtype holds, the number itself."""
    if isinstance(number, complex):
        return complex, bool(number.imag)
    if abs(number) <= harmless:
        return type(number)
    return number.hex() if isinstance(number, float) else number  # NaN too, which equals nothing
