"""Results have eager's strides, whatever the layout of the operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.lazy.compare import check, data, ints


def _image(device, *shape):
    return data(device, *(shape or (2, 4, 5, 6))).to(memory_format=torch.channels_last)


def _permuted(device):
    return data(device, 2, 3, 4).permute(2, 0, 1)


ON_PERMUTED = {
    "add": lambda x: x + x,
    "add scalar": lambda x: x + 1,
    "add broadcast": lambda x: x + x[:1],
    "add contiguous": lambda x: x + x.contiguous(),
    "contiguous add": lambda x: x.contiguous() + x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "exp of slice": lambda x: torch.exp(x[:, ::2]),
    "neg of expand": lambda x: -x.expand(2, 4, 2, 3),
    "compare": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where mixed": lambda x: torch.where(x > 0, x, x.contiguous()),
    "clamp": lambda x: x.clamp(-1, 1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.5),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "to double": lambda x: x.double(),
    "int": lambda x: x.int() + 1,
    "clone": torch.clone,
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "ones_like of slice": lambda x: torch.ones_like(x[:, ::2]),
    "ones_like contiguous": lambda x: torch.ones_like(x, memory_format=torch.contiguous_format),
    "new_zeros": lambda x: x.new_zeros(2, 3),
    "sum all": torch.sum,
    "sum": lambda x: x.sum(1),
    "sum keepdim": lambda x: x.sum((0, 2), keepdim=True),
    "mean": lambda x: x.mean(0),
    "max": lambda x: list(x.max(2)),
    "amax keepdim": lambda x: x.amax(1, keepdim=True),
    "argmax": lambda x: x.argmax(0),
    "var": lambda x: x.var(1),
    "norm": lambda x: x.norm(dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1),
    "softmax last": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: list(x.sort(0)),
    "topk": lambda x: list(x.topk(2, dim=0)),
    "cat": lambda x: torch.cat([x, x], 1),
    "cat mixed": lambda x: torch.cat([x, x.contiguous()], 2),
    "stack": lambda x: torch.stack([x, x], 1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "tile": lambda x: x.tile(2),
    "pad": lambda x: F.pad(x, (1, 2)),
    "reshape": lambda x: x.reshape(8, 3),
    "flatten": lambda x: x.flatten(1),
    "index": lambda x: x[torch.tensor([0, 1], device=x.device)],
    "index middle": lambda x: x[:, torch.tensor([0, 1], device=x.device)],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 0], device=x.device)),
    "gather": lambda x: x.gather(0, ints(x.device, 2, 2, 3, high=4)),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
    "tril": torch.tril,
    "matmul": lambda x: x @ data(x.device, 3, 5),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "linear": lambda x: F.linear(x, data(x.device, 5, 3), data(x.device, 5)),
    "einsum": lambda x: torch.einsum("abc,dc->abd", x, data(x.device, 5, 3)),
    "outer": lambda x: torch.outer(x[:, 0, 0], x[0, 0]),
    "dropout off": lambda x: F.dropout(x, 0.5, training=False),
    "pow": lambda x: x.pow(2),
    "floor divide": lambda x: x // 0.3,
    "unfold": lambda x: x.unfold(0, 2, 1) * 1,
    "diagonal": lambda x: x.diagonal(0, 1, 2) + 0,
    "expand add": lambda x: x + data(x.device, 5, 1, 1, 1),
    "zero strides": lambda x: data(x.device, 3).expand(4, 3) * 2,
    "one-sized dims": lambda x: x[:, :1] * 2,
    "foreach": lambda x: torch._foreach_mul([x, x.contiguous()], 2),
}

ON_IMAGES = {
    "add": lambda x: x + 1,
    "add channel": lambda x: x + data(x.device, 4, 1, 1),
    "add contiguous": lambda x: x + x.contiguous(),
    "conv": lambda x: F.conv2d(x, data(x.device, 3, 4, 3, 3)),
    "conv last weight": lambda x: F.conv2d(x.contiguous(), _image(x.device, 3, 4, 3, 3)),
    "conv strided bias": lambda x: F.conv2d(x, data(x.device, 3, 4, 2, 2), data(x.device, 3), stride=2, padding=1),
    "depthwise": lambda x: F.conv2d(x, data(x.device, 4, 1, 3, 3), groups=4),
    "one by one": lambda x: F.conv2d(x, data(x.device, 3, 4, 1, 1)),
    "conv transpose": lambda x: F.conv_transpose2d(x, data(x.device, 4, 3, 2, 2), stride=2),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "avg pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive pool 2": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm eval": lambda x: F.batch_norm(x, data(x.device, 4), data(x.device, 4).abs() + 1),
    "instance norm": lambda x: F.instance_norm(x),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "relu": F.relu,
    "silu": F.silu,
    "sum": lambda x: x.sum((2, 3)),
    "mean keepdim": lambda x: x.mean((2, 3), keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "half": lambda x: x.bfloat16(),
    "flatten": lambda x: x.flatten(2).transpose(1, 2),
    "view": lambda x: x[:, :2] * 2,
}


@pytest.mark.parametrize("name", ON_PERMUTED)
def test_permuted(name, tier):
    check(lambda device: ON_PERMUTED[name](_permuted(device)), ignore=("version",))


@pytest.mark.parametrize("name", ON_IMAGES)
def test_channels_last(name, tier):
    check(lambda device: ON_IMAGES[name](_image(device)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["conv", "batch norm", "max pool", "add channel", "bilinear"])
def test_gradient_of_channels_last(name, tier):
    def gradient(device):
        x = _image(device).requires_grad_()
        y = ON_IMAGES[name](x)
        (y * y).sum().backward()
        return x.grad + 0, y

    check(gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("layout", ["transposed", "image", "permuted image", "matrix"])
def test_batch_norm_of_other_layouts(layout: str, training: bool) -> None:
    """Fake kernels keep strides that the CPU's kernels do not; a view of the gradient then fails or reads wrongly."""

    def normalised(device):
        x = {
            "transposed": lambda: data(device, 4, 6, 5, grad=True).transpose(1, 2),
            "image": lambda: _image(device).requires_grad_(),
            "permuted image": lambda: data(device, 3, 2, 5, 4, grad=True).permute(1, 3, 0, 2),
            "matrix": lambda: data(device, 5, 7, grad=True).t(),
        }[layout]()
        x.retain_grad()
        channels = x.shape[1]
        mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
        out = F.batch_norm(x, mean, var, training=training)
        gradient = torch.autograd.grad(out.square().sum(), x)[0]
        return out, gradient, gradient * 2

    check(normalised, ignore=("version", "is_leaf"))


ON_ODD_WINDOWS = {
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y)),
    "polar": lambda x, y: torch.view_as_real(torch.polar(x, y)),
    "ldexp": torch.ldexp,
    "roll": lambda x, y: x.roll(1, 0),
    "roll flat": lambda x, y: x.roll(1),
}


@pytest.mark.parametrize("name", ON_ODD_WINDOWS)
def test_odd_windows(name, tier):
    """Operands that are not dense, one of them broadcast: torch's own Python rules know only dense ones."""

    def call(device):
        x = (data(device, 4, 10) ** 2 + 0.5)[:, :4].t()[1:4, ::2]
        y = (data(device, 2, 20, seed=1) ** 2 + 1)[:, 1:13].reshape(2, 3, 2, 2).permute(0, 3, 2, 1)
        return ON_ODD_WINDOWS[name](x, y.mT[1])

    check(call)


def test_roll_keeps_channels_last(tier):
    check(lambda device: (_image(device).roll(1, 0), _image(device).roll((1, 2), (0, 3)), _image(device).roll(1)))


@pytest.mark.parametrize("layout", ["matrix", "transposed", "expanded"])
def test_logsigmoid_is_row_major(layout: str) -> None:
    def call(device):
        x = {"matrix": lambda x: x, "transposed": lambda x: x.t(), "expanded": lambda x: x[:1].expand(3, 4)}[layout](
            data(device, 3, 4)
        )
        return F.logsigmoid(x)

    check(call)
