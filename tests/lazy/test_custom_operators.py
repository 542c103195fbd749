"""Operators that the program defines (`torch.library`), with kernels of its own: values, writes and gradients are
eager's, on the lazy device, in `lazy_mode` and in compiled calls, which are replayed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchlazy

CALLS = 12
_LIBRARY = torch.library.Library("tlzcustom", "DEF")


def _define(schema, function, key="CompositeExplicitAutograd"):
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], function, key)


_define("either(Tensor a, float k) -> Tensor", lambda a, k: a + (k if k < 0.45 else -k), "CompositeImplicitAutograd")
_define("both(Tensor a, float k) -> Tensor", lambda a, k: (a * k).add(k + 1), "CompositeImplicitAutograd")
ops = torch.ops.tlzcustom


@pytest.fixture(params=["cpu", "lazy"])
def device(request):
    return request.param


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compiled(function, *arguments):
    """The compiled function, after calls with each of the arguments have given what it gives by itself."""
    found = torchlazy.compile(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in arguments:
            torch.testing.assert_close(found(*given), function(*given))
    return found


@pytest.mark.parametrize("name", ["either", "both"])
def test_what_an_operator_in_python_makes_of_a_number_is_its_own(device, name):
    """The number goes to several operators, or decides of them, where nobody follows it."""
    op = getattr(ops, name)
    compiled(op, *[(data(3, seed=i).to(device), 0.1 * (i % 8) + 0.03) for i in range(CALLS)])
