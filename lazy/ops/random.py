"""Random operators: drawn inside compiled kernels from a counter-based generator, seeded by torch's CPU generator.

Each random operator draws one 63-bit seed from the CPU generator when it is recorded, so `manual_seed`, `fork_rng`,
`get_rng_state` and checkpoint's replay control lazy random numbers as they control eager ones; the seed is an input of
the program, so a new one compiles nothing. With `config.rng = "eager"` the operator runs at once with the compute
device's own generator instead, and so it does with an explicit `generator=` of the compute device, whose numbers are
its own.

Invariant: the numbers depend on the seed and the element's position alone, not on the tier or the kernel that computes
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.torch_private.settings import draw_seed
from torchlazy.lazy.trace.geometry import Geometry, check_lazy_index, geometry, indexed
from torchlazy.lazy.trace.op_schema import OpPlan
from torchlazy.prims.checked import checked as _define_check  # noqa: F401  (defines torchlazy::checked)
from torchlazy.prims.meta import contiguous_strides
from torchlazy.prims.random_bits import random_bits as _define_op  # noqa: F401  (defines torchlazy::random_bits)

aten = torch.ops.aten


class Stream:
    """The random numbers of one operator call: a seed, and as many independent streams as the distribution needs."""

    def __init__(self, recorder: Recorder, like: Geometry, generator: torch.Generator | None) -> None:
        self.recorder = recorder
        if recorder.capture is not None:
            recorder.capture.generators.draws(generator)
        seed = draw_seed(generator)
        if recorder.capture is not None:
            recorder.capture.drew_seed(generator, seed)
        self.seed = recorder.scalar_input(seed)
        self.bits_geometry = geometry(
            like.shape,
            contiguous_strides(like.shape),
            0,
            torch.int32,
            like.device,
            like.compute,  # type: ignore[arg-type]
        )
        self.next_stream = 0

    def op(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.record_pure(overload, args, kwargs)

    def bits(self) -> LazyTensor:
        """32 fresh random bits per element, as int32."""
        recorder, geom = self.recorder, self.bits_geometry
        found = recorder.append(
            torch.ops.torchlazy.random_bits.default,
            (geom.shape, self.seed, self.next_stream),
            (("device", torch.device(geom.compute)),),
            geom,
        )
        recorder.ops_recorded += 1
        self.next_stream += 1
        return recorder.new_tensor(found, geom)

    def uniform(self, dtype: torch.dtype) -> Any:
        """[0, 1) with as many bits as `dtype` holds, as float32 (float64 for float64)."""
        if dtype == torch.float64:
            high = self.op(aten._to_copy.default, self._masked(26), dtype=torch.float64)
            low = self.op(aten._to_copy.default, self._masked(27), dtype=torch.float64)
            joined = self.op(aten.add.Tensor, self.op(aten.mul.Scalar, high, 1 << 27), low)
            return self.op(aten.div.Scalar, joined, 1 << 53)
        width = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
        scaled = self.op(aten._to_copy.default, self._masked(width), dtype=torch.float32)
        return self.op(aten.div.Scalar, scaled, 1 << width)

    def _masked(self, width: int) -> Any:
        return self.op(aten.bitwise_and.Scalar, self.bits(), (1 << width) - 1)

    def open_uniform(self, dtype: torch.dtype) -> Any:
        """(0, 1]: safe under a logarithm."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self.op(aten.rsub.Scalar, self.uniform(wide), 1)

    def normal(self, dtype: torch.dtype) -> Any:
        """Standard normal by Box and Muller: sqrt(-2 log u1) cos(2 pi u2)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        radius = self.op(
            aten.sqrt.default, self.op(aten.mul.Scalar, self.op(aten.log.default, self.open_uniform(wide)), -2)
        )
        angle = self.op(aten.mul.Tensor, self.uniform(wide), 2 * math.pi)
        return self.op(aten.mul.Tensor, radius, self.op(aten.cos.default, angle))

    def exponential(self, dtype: torch.dtype, rate: float) -> Any:
        return self.op(
            aten.div.Tensor, self.op(aten.neg.default, self.op(aten.log.default, self.open_uniform(dtype))), rate
        )

    def integers(self, low: int, high: int) -> Any:
        """int64 in [low, high), high - low at most 2**32; a modulo of 32 bits, as ATen does."""
        wide = self.op(
            aten.bitwise_and.Scalar, self.op(aten._to_copy.default, self.bits(), dtype=torch.int64), 0xFFFFFFFF
        )
        return self.op(aten.add.Scalar, self.op(aten.remainder.Scalar, wide, high - low), low)


Sampler = Callable[[Stream, torch.dtype, dict[str, Any]], Any]


def _uniform(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    low, high = float(a.get("from", 0.0)), float(a.get("to", 1.0))
    if low > high or not dtype.is_floating_point:
        return None  # eager refuses
    u = s.uniform(dtype)
    if (low, high) == (0.0, 1.0):
        return u
    return s.op(aten.add.Tensor, s.op(aten.mul.Tensor, u, high - low), low)


def _normal(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    mean, std = a.get("mean", 0.0), a.get("std", 1.0)
    if not isinstance(std, torch.Tensor) and std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    z = s.normal(dtype)
    if (mean, std) == (0.0, 1.0):
        return z
    return s.op(aten.add.Tensor, s.op(aten.mul.Tensor, z, std), mean)


def _bernoulli(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    p = a["p"]
    if isinstance(p, torch.Tensor):
        if s.bits_geometry.compute == "cpu":
            within = s.op(aten.bitwise_and.Tensor, s.op(aten.ge.Scalar, p, 0), s.op(aten.le.Scalar, p, 1))
            p = s.op(torch.ops.torchlazy.checked.default, p, within, "bernoulli expects each p to be in [0, 1]")
        return s.op(aten.lt.Tensor, s.uniform(torch.float32), p)
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    return s.op(aten.lt.Scalar, s.uniform(torch.float32), p)


def _integers(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    default_high = {
        torch.float32: 1 << 24, torch.float16: (1 << 11) + 1, torch.bfloat16: (1 << 8) + 1, torch.uint8: 1 << 8,
        torch.int8: 1 << 7, torch.int16: 1 << 15, torch.int32: 1 << 31, torch.bool: 2,
    }.get(dtype)  # fmt: skip
    low = a.get("from", a.get("low", 0)) or 0
    high = a.get("to", a.get("high"))
    high = default_high if high is None else high
    if high is None or high - low > 1 << 32:
        return None
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    return s.integers(low, high)


def _exponential(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    rate = float(a.get("lambd", 1.0))
    if not rate > 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    return s.exponential(dtype, rate)


def _log_normal(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    return s.op(aten.exp.default, _normal(s, dtype, {"mean": a.get("mean", 1.0), "std": a.get("std", 2.0)}))


def _cauchy(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    if not a.get("sigma", 1.0) > 0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={a['sigma']}")
    angle = s.op(aten.mul.Tensor, s.op(aten.sub.Tensor, s.uniform(dtype), 0.5), math.pi)
    return s.op(
        aten.add.Tensor, s.op(aten.mul.Tensor, s.op(aten.tan.default, angle), a.get("sigma", 1.0)), a.get("median", 0.0)
    )


def _geometric(s: Stream, dtype: torch.dtype, a: dict[str, Any]) -> Any:
    if not 0 < a["p"] < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={a['p']}")
    logs = s.op(aten.log.default, s.open_uniform(dtype))
    return s.op(aten.ceil.default, s.op(aten.div.Tensor, logs, math.log1p(-a["p"])))


_IN_PLACE: dict[Any, Sampler] = {
    aten.uniform_: _uniform, aten.normal_: _normal, aten.bernoulli_: _bernoulli, aten.random_: _integers,
    aten.exponential_: _exponential, aten.log_normal_: _log_normal, aten.cauchy_: _cauchy, aten.geometric_: _geometric,
}  # fmt: skip
_LIKE: dict[Any, Sampler] = {
    aten.rand_like: _uniform, aten.randn_like: _normal, aten.randint_like: _integers, aten.bernoulli: _bernoulli,
}  # fmt: skip
_FACTORIES: dict[Any, Sampler] = {
    aten.rand: _uniform,
    aten.randn: _normal,
    aten.randint: _integers,
    aten.normal: _normal,
}


def _arguments(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, with the schema's defaults."""
    values = {a.name: a.default_value for a in plan.op._schema.arguments if a.has_default_value()}
    values.update(zip(plan.names, args, strict=False))
    values.update(kwargs)
    return {name: value for name, value in values.items() if value is not None}


def _draws_now(generator: torch.Generator | None, compute: str) -> bool:
    """Whether eager's kernel draws at once: with `config.rng`, or from a generator that the caller names and that the
    kernel takes. A CPU generator gives only the seed where the lazy device computes elsewhere."""
    return config.rng == "eager" or (generator is not None and generator.device.type == compute.partition(":")[0])


def _at_once(recorder: Recorder, plan: OpPlan, target: LazyTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an in-place random operator now on fresh memory, whose old content it does not read."""
    if recorder.capture is not None or any(isinstance(a, torch.Tensor) for a in args[1:]):
        return NotImplemented  # a replay runs it at once, on the memory itself
    recorder.on_draw(plan.op)
    with below_autograd():
        geom = target._geometry
        real = torch.empty_strided(geom.shape, geom.strides, dtype=geom.dtype, device=geom.compute)
        plan.op(real, *args[1:], **kwargs)
    recorder.write(target, recorder.read(recorder.new_real_tensor(real, geom.device)))
    return target


def in_place(sampler: Sampler) -> Any:
    """The handler of `x.uniform_()` and its kin."""

    def handler(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if not isinstance(target, LazyTensor):
            return NotImplemented
        values = _arguments(plan, args, kwargs)
        if _draws_now(values.get("generator"), target._geometry.compute):
            return _at_once(recorder, plan, target, args, kwargs)
        dtype = target._geometry.dtype
        if dtype.is_complex:
            return _at_once(recorder, plan, target, args, kwargs)
        sampled = sampler(Stream(recorder, target._geometry, values.get("generator")), dtype, values)
        if sampled is None:
            return _at_once(recorder, plan, target, args, kwargs)
        recorder.write(target, recorder.read(_as(recorder, sampled, dtype)))
        return target

    return handler


def _as(recorder: Recorder, value: Any, dtype: torch.dtype) -> Any:
    return value if value.dtype == dtype else recorder.record_pure(aten._to_copy.default, (value,), {"dtype": dtype})


def like(sampler: Sampler) -> Any:
    """The handler of `rand_like` and of `bernoulli(x)`."""

    def handler(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        device = kwargs.get("device")
        if not isinstance(source, LazyTensor) or _draws_now(kwargs.get("generator"), source._geometry.compute):
            return NotImplemented
        if device is not None and device != source._geometry.device:
            return NotImplemented
        values = _arguments(plan, args, kwargs)
        dtype = values.get("dtype", source._geometry.dtype)
        if dtype.is_complex:
            return NotImplemented
        if sampler is _bernoulli:
            values.setdefault("p", source)
            if not dtype.is_floating_point and values["p"] is source:
                return NotImplemented  # eager refuses probabilities that are whole numbers
        sampled = sampler(Stream(recorder, source._geometry, values.get("generator")), dtype, values)
        if sampled is None:
            return NotImplemented
        return _laid_out_like(recorder, _as(recorder, sampled, dtype), source, values.get("memory_format"))

    return handler


def _laid_out_like(recorder: Recorder, value: LazyTensor, source: LazyTensor, layout: Any) -> LazyTensor:
    """`value` with the strides that `empty_like(source)` has; the numbers depend on logical positions alone."""
    if source._geometry.is_plain and layout in (None, torch.preserve_format):
        return value
    target = recorder.record_pure(aten.empty_like.default, (source,), {"dtype": value.dtype, "memory_format": layout})
    recorder.write(target, recorder.read(value))
    return target


def factory(sampler: Sampler) -> Any:
    """The handler of `torch.rand(...)` and its kin."""

    def handler(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        values = _arguments(plan, args, kwargs)
        if "size" not in values or any(isinstance(v, torch.Tensor) for v in values.values()):
            return NotImplemented
        device = values.get("device", torch.device("cpu"))
        if device.type != "lazy" and (not recorder.mode_depth or device.type not in ("cpu", "cuda")):
            return NotImplemented
        default = torch.int64 if sampler is _integers else torch.get_default_dtype()
        if device.type == "lazy":
            check_lazy_index(device)
        dtype = values.get("dtype", default)
        if not isinstance(dtype, torch.dtype):
            dtype = default  # the schema's own default is a number
        if dtype.is_complex or any(n < 0 for n in values["size"]):
            return NotImplemented
        shape = tuple(values["size"])
        compute = recorder.target if device.type == "lazy" else str(indexed(device))
        if _draws_now(values.get("generator"), compute):
            return NotImplemented
        claimed = LAZY if device.type == "lazy" else indexed(device)
        geom = geometry(shape, contiguous_strides(shape), 0, dtype, claimed, compute)  # type: ignore[arg-type]
        sampled = sampler(Stream(recorder, geom, values.get("generator")), dtype, values)
        return NotImplemented if sampled is None else _as(recorder, sampled, dtype)

    return handler


def native_dropout(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(x * mask / (1 - p), mask) with a bool mask."""
    source, p, train = args
    if config.rng == "eager" or not isinstance(source, LazyTensor) or train is False:
        return NotImplemented
    s = Stream(recorder, source._geometry, None)
    mask = s.op(aten.ge.Scalar, s.uniform(torch.float32), float(p))
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    kept = s.op(aten.mul.Tensor, s.op(aten.mul.Tensor, source, mask), scale)
    return kept, mask


def install(recorder: Recorder) -> None:
    """Put the random operators into the recorder's table."""
    for table, make in ((_IN_PLACE, in_place), (_LIKE, like), (_FACTORIES, factory)):
        for packet, sampler in table.items():
            for name in packet.overloads():
                overload = getattr(packet, name)
                if name.endswith("out") or (packet is aten.normal and "Tensor" in name):
                    continue
                recorder.handlers[overload] = make(sampler)
    recorder.handlers[aten.native_dropout.default] = native_dropout
