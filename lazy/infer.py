"""Result geometry of an operator, from torch's own fake kernels.

Invariant: nothing here is on the hot path; the recorder caches what `infer` returns by operator, input geometry and
constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchlazy.lazy.geometry import Geometry, geometry

_FAKE = FakeTensorMode(allow_non_fake_inputs=True)


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
        if any(not isinstance(n, int) for n in value.shape):
            raise CannotInfer("the result's shape depends on data")
        claimed = device if str(value.device) == compute else value.device
        return geometry(
            tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, claimed, str(value.device)
        )
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
    try:
        with _FAKE, torch.no_grad():
            fake_args, fake_kwargs = _fakes(list(args)), {name: _fakes(v) for name, v in kwargs.items()}
            result = op(*fake_args, **fake_kwargs)
    except Exception as error:
        raise CannotInfer(f"{op}: {type(error).__name__}: {error}") from error
    after = _geometries_or_constants(fake_args, device, compute)
    return _geometries(result, device, compute), (
        after,
        {name: _geometries_or_constants(v, device, compute) for name, v in fake_kwargs.items()},
    )


def _geometries_or_constants(value: Any, device: torch.device, compute: str) -> Any:
    if isinstance(value, torch.Tensor):
        return _geometries(value, device, compute)
    if isinstance(value, list):
        return [_geometries_or_constants(item, device, compute) for item in value]
    return value
