"""A fixed part of the operator database in every run of the tests: operators of all families, compiled, with gradients.

`make opinfo` runs all of it; here an operator has few samples, and all samples of an operator are one program.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator database needs it; it is a development dependency")

from tests.opinfo.exceptions import is_known
from tests.opinfo.readings import run_reading
from tests.opinfo.samples import database

# Compiled and run: one of each way through lowering and code generation.
COMPILED = (
    "add", "div.floor_rounding", "where", "clamp", "nn.functional.gelu", "sum", "var_mean", "argmax", "softmax",
    "__getitem__", "gather", "cat", "constant_pad_nd", "roll", "as_strided_scatter", "nn.functional.layer_norm",
    "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.embedding", "cumsum",
    "sort", "linalg.norm", "fft.fft2", "to_sparse",
)  # fmt: skip
# Through the interpreter of loop IR, which costs no C++ compiler: forward and gradient.
INTERPRETED = (
    "mul", "pow", "atan2", "logaddexp", "xlogy", "nan_to_num", "lerp", "addcmul", "prod", "amax", "logsumexp", "median",
    "std", "norm", "index_select", "index_put", "scatter_add", "masked_fill", "take_along_dim", "diagonal", "tril",
    "_unsafe_masked_index_put_accumulate", "unfold", "expand", "permute", "split", "stack", "narrow", "repeat",
    "einsum", "matmul", "bmm", "addmm",
    "nn.functional.linear", "nn.functional.group_norm", "nn.functional.cross_entropy", "nn.functional.huber_loss",
    "nn.functional.interpolate.bilinear", "nn.functional.avg_pool2d", "nn.functional.pad.reflect",
    "nn.functional.scaled_dot_product_attention", "nn.functional.silu", "nn.functional.grid_sample", "linalg.inv",
)  # fmt: skip


def _check(name: str, reading: str, dtype: torch.dtype, through: str | None, limit: int) -> None:
    report = run_reading(database()[name], reading, dtype, limit=limit, through=through)
    result = report.as_dict()
    bad = [failure for failure in report.failures if is_known(result, failure.kind) is None]
    assert not bad, "\n".join(f"#{f.sample} {f.kind}: {f.text}" for f in bad)
    assert report.passed, f"{name}: eager ran none of {report.refused} samples"


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    _check(name, "b", torch.float32, None, 4)


@pytest.mark.parametrize("name", INTERPRETED)
def test_forward(name: str) -> None:
    _check(name, "b", torch.float32, "loops", 3)


@pytest.mark.parametrize("name", INTERPRETED)
def test_gradient(name: str) -> None:
    _check(name, "c", torch.float32, "loops", 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["add", "where", "sum", "__getitem__", "cat", "amax", "clamp"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    if dtype not in database()[name].supported_dtypes("cpu"):
        pytest.skip(f"{name} takes no {dtype}")
    _check(name, "b", dtype, "loops", 3)


# Of each way that in-place, `out=` and composed forms take through the recorder.
FORMS = (
    "add", "clamp", "cumsum", "matmul", "linalg.matrix_rank", "kron", "sort", "unbind_copy", "masked_scatter",
    "index_add", "geqrf", "sum", "logit",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_other_forms(name: str) -> None:
    _check(name, "d", torch.float32, "loops", 2)


# Of each way that an error is found: our own checks, meta kernels, a trial run, a real run, and the values themselves.
@pytest.mark.parametrize(
    "name",
    ["cat", "gather", "take", "as_strided_scatter", "index_add", "bucketize", "amax", "gradient", "scatter"],
)
def test_error_inputs(name: str) -> None:
    report = run_reading(database()[name], "e", torch.float32, limit=0)
    assert not report.failures, "\n".join(f"#{f.sample} {f.kind}: {f.text}" for f in report.failures)
    assert report.passed + report.late


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["exp", "floor_divide", "xlogy", "logit", "sub", "nn.functional.gelu", "addcdiv"])
def test_chains_of_halves_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    _check(name, "p", dtype, None, 1)
