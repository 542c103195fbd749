"""A fixed part of the operator database through joint graphs in every run: equality with eager, torch's gradcheck.

`python -m tests.opinfo.run --reading f,g` runs all of it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator database needs it; it is a development dependency")

from tests.opinfo.readings import run_reading
from tests.opinfo.samples import database

EQUAL = (
    "mul", "pow", "where", "softmax", "logsumexp", "var_mean", "__getitem__", "gather", "index_put", "cat", "split",
    "diagonal_scatter", "as_strided_scatter", "t", "matmul", "linalg.inv", "native_layer_norm", "view_as_complex",
    "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention", "nn.functional.dropout", "masked_select",
)  # fmt: skip
CHECKED = (
    "mul", "atan2", "softmax", "cumsum", "split", "index_select", "matmul", "linalg.cholesky", "nn.functional.gelu",
    "nn.functional.layer_norm", "nn.functional.conv1d", "nn.functional.interpolate.bilinear",
)  # fmt: skip
# What cannot be recorded ahead of time, and must say so: a value is read on the host, or another tensor is computed.
LEFT_OUT = ("linalg.inv", "view_as_complex", "nn.functional.dropout", "masked_select", "linalg.cholesky")


def _check(name: str, reading: str, dtype: torch.dtype, limit: int) -> None:
    report = run_reading(database()[name], reading, dtype, limit=limit)
    assert not report.failures, "\n".join(f"#{f.sample} {f.kind}: {f.text}" for f in report.failures)
    left_out = sum(n for label, n in report.counts.items() if label.startswith("left out"))
    assert report.passed and (left_out < report.passed or name in LEFT_OUT), dict(report.counts)


@pytest.mark.parametrize("name", EQUAL)
def test_results_and_gradients_are_eagers(name: str) -> None:
    _check(name, "f", torch.float32, 2)


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    _check(name, "g", torch.float64, 1)
