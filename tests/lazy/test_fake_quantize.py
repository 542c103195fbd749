"""Fake quantization, as in training that is aware of quantization: recorded, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torchlazy

pytestmark = pytest.mark.usefixtures("operator_by_operator")
NUMBER, CHANNELS = (torch.tensor([0.1]), torch.tensor([3.0])), (torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3))

PROGRAMS = {
    "numbers": lambda x, _: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
    "tensors": lambda x, q: torch.fake_quantize_per_tensor_affine(x, q[0][0], q[1][0].int(), 0, 255),
    "channels": lambda x, q: torch.fake_quantize_per_channel_affine(x, q[0], q[1].int(), 0, -8, 7),
    "channels, float": lambda x, q: torch.fake_quantize_per_channel_affine(x, q[0], q[1], 0, -8, 7),
    "learned": lambda x, q: torch._fake_quantize_learnable_per_tensor_affine(x, *q, 0, 255, 0.5),
    "learned channels": lambda x, q: torch._fake_quantize_learnable_per_channel_affine(x, *q, 0, -8, 7, 0.5),
}


def gradients(name, device, transposed):
    """The result and all gradients; what cannot have one is left out."""
    x = torch.linspace(-2, 2, 12).reshape(4, 3).t() if transposed else torch.linspace(-2, 2, 12).reshape(3, 4)
    x = x.to(device).requires_grad_()
    kept = [q.clone().to(device) for q in (CHANNELS if "channels" in name else NUMBER)]
    wanted = [x, *(q.requires_grad_() for q in kept)] if "learned" in name else [x]
    found = PROGRAMS[name](x, kept)
    return [found.detach(), *torch.autograd.grad(found.square().sum(), wanted)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_recorded(name, transposed):
    torchlazy.reset_metrics()
    found = gradients(name, "lazy", transposed)
    assert torchlazy.metrics()["fallbacks"] == {}
    expected = gradients(name, "cpu", transposed)
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    torch.testing.assert_close([t.cpu() for t in found], expected)


def test_compiled_calls_replay_it():
    weight = torch.nn.Parameter(torch.linspace(-2, 2, 12).reshape(3, 4))

    def step(x):
        scale = weight.detach().abs().amax(1) / 7
        made = torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros_like(scale).int(), 0, -8, 7)
        (x @ made.t()).square().mean().backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        return made.detach()

    compiled, begun = torchlazy.compile(step), weight.detach().clone()
    inputs = [torch.full((2, 4), n / 4) for n in range(6)]
    found = [compiled(x) for x in inputs]
    assert compiled.report().replays > 0
    with torch.no_grad():
        weight.copy_(begun)
    torch.testing.assert_close(found, [step(x) for x in inputs])


@pytest.mark.usefixtures("device_in_python")  # natively at its call
def test_a_zero_point_out_of_range_raises_where_it_is_computed():
    x, scale, zero_point = torch.ones(3).to("lazy"), torch.ones(3).to("lazy"), torch.full((3,), 9).int().to("lazy")
    found = torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, 0, 7)
    with pytest.raises(RuntimeError, match="zero_point"):
        found.cpu()
