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
