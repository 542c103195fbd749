"""Sequences of signal processing: window functions, frequencies of a Fourier transform, `range`, `logspace`.

Invariant: computed from an iota in the result's dtype with ATen's formulas, in its order of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.activations import call
from torchlazy.prims.decomps.creation import constant
from torchlazy.prims.decomps.value import Value, iota
from torchlazy.prims.promotion import is_integral

aten = torch.ops.aten
PLAIN = (torch.float32, torch.float64)

Formula = Callable[..., Value]  # (positions, length, further parameters)


def _window(b: Builder, length: int, periodic: bool, formula: Formula, *parameters: float) -> Node | None:
    """A periodic window is one of a further element, left out."""
    wanted = b.wanted
    if wanted.dtype not in PLAIN or not isinstance(length, int):
        return None
    if length <= 1:
        return constant(b, 1)
    positions = iota(b, length, wanted.device, dtype=wanted.dtype)
    return formula(positions, length + 1 if periodic else length, *parameters).node


def _cosine(x: Value) -> Value:
    return call(P.cos, x)


def _hamming(x: Value, length: int, alpha: float = 0.54, beta: float = 0.46) -> Value:
    """alpha - beta * cos(2 pi i / (n - 1))"""
    return _cosine(x * (math.pi * 2.0 / (length - 1))) * -beta + alpha


def _hann(x: Value, length: int) -> Value:
    return _hamming(x, length, 0.5, 0.5)


def _blackman(x: Value, length: int) -> Value:
    """0.08 cos(4 pi i / (n - 1)) - 0.5 cos(2 pi i / (n - 1)) + 0.42"""
    x = x * (math.pi / (length - 1))
    return _cosine(x * 4.0) * 0.08 - _cosine(x * 2.0) * 0.5 + 0.42


def _bartlett(x: Value, length: int) -> Value:
    """2 i / (n - 1), and 2 less that from the middle on"""
    line = x * (2.0 / (length - 1))
    return x.le(float((length - 1) >> 1)).where(line, line * -1.0 + 2.0)


def _register_window(name: str, formula: Formula) -> None:
    @rule(f"{name}.default")
    def window(b: Builder, length: int, **_: Any) -> Node | None:
        return _window(b, length, True, formula)

    @rule(f"{name}.periodic", f"{name}.periodic_alpha", f"{name}.periodic_alpha_beta")
    def periodic_window(b: Builder, length: int, periodic: bool, *parameters: float, **_: Any) -> Node | None:
        if any(isinstance(parameter, Node) for parameter in parameters):
            return None
        return _window(b, length, periodic, formula, *parameters)


_register_window("hamming_window", _hamming)
_register_window("hann_window", _hann)
_register_window("blackman_window", _blackman)
_register_window("bartlett_window", _bartlett)


def _frequencies(b: Builder, n: int, d: float, count: int, *, both_halves: bool) -> Node | None:
    wanted = b.wanted
    if wanted.dtype not in PLAIN or isinstance(d, Node) or not isinstance(n, int):
        return None
    i = iota(b, count, wanted.device, dtype=wanted.dtype)
    if both_halves:  # the upper half are negative frequencies
        i = i.ge(float((n + 1) // 2)).where(i - float(n), i)
    return (i * (1.0 / (n * d))).node


@rule("fft_fftfreq.default")
def fftfreq(b: Builder, n: int, d: float = 1.0, **_: Any) -> Node | None:
    """0, 1, ... -2, -1, each / (n * d)"""
    return _frequencies(b, n, d, n, both_halves=True)


@rule("fft_rfftfreq.default")
def rfftfreq(b: Builder, n: int, d: float = 1.0, **_: Any) -> Node | None:
    """0, 1, ... n // 2, each / (n * d)"""
    return _frequencies(b, n, d, n // 2 + 1, both_halves=False)


@rule("range.step", "range.default")
def range_(b: Builder, start: Any, end: Any, step: Any = 1, **_: Any) -> Node | None:
    """start + i * step, with the end among them"""
    wanted = b.wanted
    if isinstance(start, Node) or isinstance(step, Node) or is_integral(wanted.dtype) or wanted.dtype not in PLAIN:
        return None
    i = iota(b, wanted.shape[0], wanted.device, dtype=torch.float64)  # as ATen's CPU kernel accumulates
    return (i * float(step) + float(start)).to(wanted.dtype).node
