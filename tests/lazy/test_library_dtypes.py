"""Tensors of dtypes that no kernel computes with: each of their operators is the library's, the rest of the program is
compiled."""

from __future__ import annotations

import pytest
import torch
import torchlazy


def _values(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    q = x.to(dtype)
    memory = torch.zeros(8, 16, dtype=dtype, device=x.device)
    memory.copy_(x)
    part = memory.clone()
    part[2:4] = q[:2]
    found = [
        q,
        q.t().contiguous(),
        q[2:5],
        q.reshape(4, 32),
        (q.float() * 2 + 1).to(dtype),
        memory,
        part,
        q.expand(2, 8, 16),
    ]
    return [value.float() * 0.5 for value in found] + [q.view(torch.uint8), q.float().sum()]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32"])
def test_values_are_eagers_and_the_rest_is_compiled(name: str) -> None:
    dtype = getattr(torch, name)
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    x = torch.arange(128.0).reshape(8, 16) / 3
    wanted = _values(x, dtype)
    found = [value.cpu() for value in _values(x.to("lazy"), dtype)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    metrics = torchlazy.metrics()
    assert metrics["kernels"] and not any("cannot compile" in reason for reason in metrics["fallbacks"])
    if dtype.is_floating_point:
        assert metrics["fallbacks"][f"aten._to_copy.default: {name} dtype"]


def _kept_twice(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Equal values that are kept twice, which a program computes once and copies."""
    first, second = torch.zeros(4, dtype=dtype, device=x.device), torch.zeros(4, dtype=dtype, device=x.device)
    q, twin = x.to(dtype), x.to(dtype)
    filled = torch.full((3,), 1.5, dtype=dtype, device=x.device), torch.full((3,), 1.5, dtype=dtype, device=x.device)
    return [first, second, q, twin, q.clone(), q.t(), *filled]


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64"])
def test_equal_values_that_are_kept_twice(name: str, device: str) -> None:
    dtype = getattr(torch, name)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    x = torch.arange(12.0).reshape(3, 4) / 3
    wanted = [value.to(wide) for value in _kept_twice(x, dtype)]
    if device == "lazy":
        found = _kept_twice(x.to("lazy"), dtype)
    else:
        with torchlazy.lazy_mode():
            found = _kept_twice(x, dtype)
    found[0].fill_(2.0)  # of one of them only
    found[2].fill_(2.0)
    for place, (mine, eager) in enumerate(zip(found, wanted, strict=True)):
        is_seen = place in (0, 2, 5)  # the sixth is a view of the third
        torch.testing.assert_close(mine.cpu().to(wide), torch.full_like(eager, 2.0) if is_seen else eager)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_what_eager_refuses_is_refused_at_the_call(name: str) -> None:
    torchlazy.config.tiers, torchlazy.config.strict = "off", True
    x = torch.arange(12.0, device="lazy") / 3
    with pytest.raises(NotImplementedError):
        x.to(getattr(torch, name)) + x.to(getattr(torch, name))
