"""Forward derivatives (dual tensors, `torch.func.jvp`): on the lazy device, in `lazy_mode` and compiled, as eager's.

Invariant: what a tangent is asked about (sizes, layout, memory) is answered without a cut.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torchlazy
from torch.autograd import forward_ad
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("operator_by_operator")
W = torch.linspace(-1, 1, 12).view(3, 4)
D = torch.linspace(2, -1, 12).view(3, 4)

PROGRAMS = {
    "times a number": lambda w: w * 0.5,
    "a number behind a sum": lambda w: 0.01 * w.square().sum(),
    "plus and over numbers": lambda w: (w + 2).sin().sum() / 3,
    "a number on the left": lambda w: 1 / (2 - w.cos()),
    "powers and comparisons": lambda w: torch.where(w > 0.1, w**2, 3 - w).mean(0),
    "a loss": lambda w: F.cross_entropy(w @ W.t().to(w.device), torch.tensor([0, 2, 1], device=w.device)) * 0.5,
}
WAYS = {
    "lazy": ("lazy", contextlib.nullcontext),
    "lazy_mode": ("cpu", torchlazy.lazy_mode),
    "compile": ("cpu", contextlib.nullcontext),
    "compile lazy": ("lazy", contextlib.nullcontext),
}


def dual(function, w, d):
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(w, d)))
    return value, tangent


def over_gradients(function, w, d):
    return torch.func.jvp(torch.func.grad(lambda w: function(w).sum()), (w,), (d,))


@pytest.mark.filterwarnings("ignore:torchlazy.compile.*runs its Python")
@pytest.mark.parametrize("kind", [dual, over_gradients], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, way, kind):
    expected = kind(PROGRAMS[name], W, D)
    device, block = WAYS[way]

    def run(w, d):
        return kind(PROGRAMS[name], w, d)

    call = torchlazy.compile(run) if way.startswith("compile") else run
    for _ in range(3 if way.startswith("compile") else 1):
        with block():
            found = call(W.to(device), D.to(device))
        torch.testing.assert_close([x.cpu() for x in found], list(expected))


@pytest.mark.parametrize("way", ["lazy", "lazy_mode"])
def test_a_tangent_needs_no_cut(way):
    device, block = WAYS[way]
    w, d = W.to(device), D.to(device)
    with block():
        torchlazy.reset_metrics()
        kept = [dual(PROGRAMS[name], w, d) for name in PROGRAMS]
        kept.append(over_gradients(PROGRAMS["a loss"], w, d))
        assert torchlazy.metrics()["cuts"] == {}
    assert len(kept) == len(PROGRAMS) + 1


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x[:0]])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_copy_on_the_meta_device_has_the_layout_and_needs_no_cut(make, dtype):
    expected = make(W).to("meta", dtype)
    x = make(W.to("lazy") + 1)
    torchlazy.reset_metrics()
    found = x.to("meta", dtype)
    assert found.is_meta and found.dtype == expected.dtype and found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert torchlazy.metrics()["cuts"] == {}


def _dual_of(make, tangent_of, see):
    def run(device):
        with forward_ad.dual_level():
            x = make(torch.arange(1.0, 13.0).to(device))
            t = tangent_of(x).detach()
            return tuple(
                one.resolve_conj().resolve_neg() for one in forward_ad.unpack_dual(see(forward_ad.make_dual(x, t)))
            )

    return run


def _complex(x):
    return torch.view_as_complex(x.view(6, 2))


def _twice(x):
    return torch.full_like(x, 2 + 3j) if x.is_complex() else x * 2


VIEWS = {
    "real part of a conjugate": _dual_of(lambda x: _complex(x).conj(), lambda x: x.clone(), torch.real),
    "imaginary part of a conjugate": _dual_of(lambda x: _complex(x).conj(), _twice, torch.imag),
    "rows of a conjugate": _dual_of(lambda x: _complex(x).conj(), _twice, lambda y: y[1:] * 1j),
    "parts of a column": _dual_of(lambda x: _complex(x)[::2], _twice, torch.view_as_real),
    "a negated view": _dual_of(lambda x: _complex(x).conj().imag, _twice, lambda y: y[::2] * 3),
    "beyond a window": _dual_of(lambda x: x[:4], _twice, lambda y: y.as_strided((12,), (1,), 0)),
    "between the rows": _dual_of(lambda x: x.view(4, 3)[:, 1], _twice, lambda y: y.as_strided((4, 3), (3, 1), 0)),
}


@pytest.mark.filterwarnings("ignore:torchlazy.compile.*runs its Python")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_duals(name, way):
    expected = VIEWS[name]("cpu")
    device, block = WAYS[way]
    call = torchlazy.compile(VIEWS[name]) if way.startswith("compile") else VIEWS[name]
    for _ in range(3 if way.startswith("compile") else 1):
        with block():
            found = call(device)
        torch.testing.assert_close([x.cpu() for x in found], list(expected))


def test_views_of_duals_of_a_batch():
    x, t = torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4)

    def run(x, t):
        return torch.func.vmap(lambda x, t: torch.func.jvp(lambda y: y[1:].clone().mul_(y[:3]), (x[:],), (t,)))(x, t)

    torch.testing.assert_close([one.cpu() for one in run(x.to("lazy"), t.to("lazy"))], list(run(x, t)))
