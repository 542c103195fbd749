"""Scaled dot product attention: every kind of mask and of heads, through the fused operator and the composite one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torchlazy.lazy.ops import composites
from torchlazy.lazy.plan.pipeline import plan_trace
from torchlazy.runtime.program.program import Allocate, ExternCall, Reinterpret, ValueRef

from tests.lazy.compare import check, data, ints
from tests.lazy.recorded_traces import OPTIONS, longest_of, recorded

pytestmark = pytest.mark.usefixtures("device_in_python")


def _mask(device: str, kind: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind == "float":
        return data(device, 2, 1, 5, 5, seed=7)
    keep = ints(device, 2, 1, 5, 5, high=2) > 0
    return keep | torch.eye(5, dtype=torch.bool, device=device)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("heads", [4, 1], ids=["own heads", "one shared head"])
def test_masks_and_heads(kind: str, heads: int) -> None:
    """A shared head of keys takes the composite path, whose operator adds its mask, whatever the mask's dtype."""

    def attend(device):
        q = data(device, 2, 4, 5, 8, grad=True)
        k, v = data(device, 2, heads, 5, 8, seed=1, grad=True), data(device, 2, heads, 5, 8, seed=2, grad=True)
        out = F.scaled_dot_product_attention(q, k, v, _mask(device, kind))
        out.square().sum().backward()
        return out.detach(), q.grad, k.grad, v.grad

    check(attend, ignore=("stride", "is_contiguous", "storage_offset", "version"))


def test_three_dimensions_with_bool_mask() -> None:
    def attend(device):
        q, k, v = (data(device, 2, 5, 8, seed=i) for i in range(3))
        keep = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
        return F.scaled_dot_product_attention(q, k, v, keep)

    check(attend, ignore=("stride", "is_contiguous"))


def test_a_gpu_gets_the_kernels_that_know_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel would align a causal mask at the last key; the other one wants rows at a multiple of 16."""
    called = []
    for name in ("flash", "efficient"):
        operator = f"_scaled_dot_product_{name}_attention"
        fake = SimpleNamespace(default=lambda *args, _name=name, **kwargs: (called.append((_name, args)), None))
        monkeypatch.setattr(composites.aten, operator, fake)
    q, k = torch.rand(1, 2, 3, 8, dtype=torch.bfloat16), torch.rand(1, 2, 6, 8, dtype=torch.bfloat16)
    composites._on_cuda(q, q, q, None, 0.0, True, None)
    composites._on_cuda(q, k, k, None, 0.0, False, None)
    composites._on_cuda(q, k, k, None, 0.0, True, None)
    composites._on_cuda(q, k, k, torch.zeros(3, 6), 0.0, False, None)
    assert [name for name, _ in called] == ["flash", "flash", "efficient", "efficient"]
    bias = called[-1][1][3]
    assert bias.shape == (1, 2, 3, 6) and bias.stride() == (0, 0, 16, 1) and bias.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "mask",
    [torch.randn(16, 16).t(), torch.randn(3, 16, 16, 2).permute(0, 3, 1, 2)[:1], torch.randn(16, 1),
     torch.randn(1, 32)[:, 1:17], torch.randn(16, 40)[:, :16], torch.randn(1, 16, 7, 2).permute(0, 3, 1, 2)],
    ids=["transposed", "position bias", "one number a query", "odd place", "rows of another pitch", "odd length"],
)  # fmt: skip
def test_masks_reach_a_gpu_in_dense_aligned_rows(mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    fake = SimpleNamespace(default=lambda *args, **kwargs: (called.append(args), None))
    monkeypatch.setattr(composites.aten, "_scaled_dot_product_efficient_attention", fake)
    q, k = torch.rand(1, 2, 16, 8), torch.rand(1, 2, 7 if mask.size(-1) == 7 else 16, 8)
    composites._on_cuda(q, k, k, mask, 0.0, False, None)
    bias = called[0][3]
    torch.testing.assert_close(bias, mask.expand(1, 2, 16, k.size(2)), rtol=0, atol=0)
    assert (
        bias.stride(-1) == 1 and bias.storage_offset() % 16 == 0 and all(step % 16 == 0 for step in bias.stride()[:-1])
    )


def planned_attention(step: Callable[[], torch.Tensor]) -> tuple[str, list[Any]]:
    """The attention that a GPU's program of the step calls: its name, and the metadata of its operands in memory."""
    with recorded("cuda:0") as found:
        trace = longest_of(step, found)
    program = plan_trace(trace, OPTIONS["triton"]).program
    metas = {step.name: step.meta for step in program.steps if isinstance(step, Allocate | Reinterpret)}
    (call,) = (step for step in program.steps if isinstance(step, ExternCall) and "attention" in step.op)
    return call.op, [metas[ref.name] for ref in call.args[:4] if isinstance(ref, ValueRef)]


@pytest.mark.parametrize("keys", [1, 2])
def test_a_gpu_gets_a_bias_that_was_made_by_heads_with_its_rows_dense(keys: int) -> None:
    """As T5's: (1, heads, 1, 1) of a permuted table counts as channels-last, and its kernel wants rows of stride 1."""

    def step() -> torch.Tensor:
        table, places = torch.ones(32, 2, device="lazy"), torch.zeros(1, keys, dtype=torch.long, device="lazy")
        bias = table[places].permute(2, 0, 1).unsqueeze(0)
        q, k = (torch.ones(2, length, 2, 8, device="lazy").transpose(1, 2) for length in (1, keys))
        return F.scaled_dot_product_attention(q, k, k, bias)

    _, operands = planned_attention(step)
    assert len(operands) == 4
    assert operands[3].strides[-1] == 1 and all(stride % 4 == 0 for stride in operands[3].strides[:-1])


@pytest.mark.parametrize("keys", [0, 4, 15])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_gpu_gets_one_query_with_the_strides_that_were_recorded(keys: int, is_masked: bool) -> None:
    """Its kernel checks that rows begin at multiples of 4 floats, also where there is one row."""

    def step() -> torch.Tensor:
        x, kept = torch.ones(2, 1, 16, device="lazy"), torch.zeros(2, 2, keys, 8, device="lazy")
        together = F.linear(x, torch.ones(48, 16, device="lazy"))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in together.split(16, -1))
        k, v = (torch.cat([kept, part], 2) for part in (k, v))
        mask = (x[:, :, :1, None] + torch.zeros(2, 1, 1, keys + 1, device="lazy")) if is_masked else None
        return F.scaled_dot_product_attention(q, k, v, mask)

    op, operands = planned_attention(step)
    assert op == "aten._scaled_dot_product_efficient_attention.default" and len(operands) == 3 + is_masked
    for meta in operands:
        assert meta.strides[-1] == 1 and all(stride % 4 == 0 for stride in meta.strides[:-1])
