"""Window functions and frequencies: values against ATen eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.prims.graphs import check

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", (None, torch.float32, torch.float64))
@pytest.mark.parametrize("length", (0, 1, 2, 5, 8, 33))
@pytest.mark.parametrize("name", ("hann_window", "hamming_window", "blackman_window", "bartlett_window"))
def test_windows(name: str, length: int, dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {"dtype": dtype, "device": CPU}
    near = {"rtol": 1e-5, "atol": 1e-6}
    packet = getattr(aten, name)
    check(packet.default, length, **options, **near)
    for periodic in (True, False):
        check(packet.periodic, length, periodic, **options, **near)
    if name == "hamming_window":
        check(packet.periodic_alpha, length, False, 0.6, **options, **near)
        check(packet.periodic_alpha_beta, length, True, 0.6, 0.3, **options, **near)


def test_frequencies_and_range() -> None:
    for n in (2, 3, 8, 9):
        check(aten.fft_fftfreq.default, n, 0.5, device=CPU)
        check(aten.fft_rfftfreq.default, n, 0.5, device=CPU)
    check(aten.range.step, 0.0, 3.0, 0.5, device=CPU, dtype=torch.float32)
    check(aten.range.step, 5, -2, -1, device=CPU, dtype=torch.float64)
