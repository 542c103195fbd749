"""Convolutions on channels-last memory: the same values through the compiler, outputs as eager lays them out."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torchlazy
from torch import fx, nn
from torch.nn import functional as F
from torchlazy.lazy.plan import pipeline, split_joint
from torchlazy.lazy.plan.saved_layout import channels_last_values
from torchlazy.prims import ops
from torchlazy.prims.decomps import cpu_kernels
from torchlazy.prims.passes import conv_layout as stage
from torchlazy.prims.verify import PRIMS, verify


@pytest.fixture
def laid_out(monkeypatch):
    """Lay convolutions out on the CPU too, and take pooling apart there."""
    made = []

    def lay_out(graph):
        found = stage.channels_last_convolutions(graph, device="cpu")
        verify(found, PRIMS)
        for before, after in zip(_outputs(graph), _outputs(found), strict=True):
            assert before == after, "what leaves the program has the strides that it was promised, sizes of 1 included"
        made.append(found)
        return found

    monkeypatch.setattr(pipeline, "channels_last_convolutions", lay_out)
    monkeypatch.setattr(split_joint, "channels_last_values", partial(channels_last_values, device="cpu"))
    monkeypatch.setattr(cpu_kernels, "ENABLED", False)
    return made


def _outputs(graph):
    (output,) = (node for node in graph.nodes if node.op == "output")
    return [result.meta["val"] for result in output.args[0]]


@pytest.fixture(autouse=True)
def compiled_at_once():
    before = torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store
    torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store = "off", True, "off"
    yield
    torchlazy.config.tiers, torchlazy.config.strict, torchlazy.config.store = before


class Residual(nn.Module):
    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


def _pooled(groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(8, groups), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def _upsampled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.GELU(), nn.ConvTranspose2d(6, 4, 2, 2), nn.AvgPool2d(2), nn.GroupNorm(2, 4),
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3), nn.Flatten(2), nn.Linear(10 * 10, 3), nn.Flatten(),
    )  # fmt: skip


class Dense(nn.Module):
    """Values joined along the channels, sliced and padded."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.last = nn.Conv2d(15, 4, 3)

    def forward(self, x):
        for conv in self.convs:
            x = torch.cat([x, F.silu(conv(x))], 1)
        x = F.pad(x, (1, 2, 0, 1))[:, :, 1:, ::2]
        return self.last(x).flatten(1)


def _step(device: str, build, dtype: torch.dtype | None):
    torch.manual_seed(0)
    model = build().to(device)
    x = torch.randn(2, 3, 12, 12).to(device).requires_grad_()
    with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(x)
        loss = out.float().square().mean()
    loss.backward()
    found = [out.detach().float(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return [(t.cpu(), t.stride()) for t in found]


def _compare(found, wanted, **close) -> None:
    for (a, strides), (b, wanted_strides) in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **close)
        assert strides == wanted_strides


BUILDS = [_pooled, lambda: _pooled(8), lambda: _pooled(2), _upsampled, Dense]


@pytest.mark.parametrize("build", BUILDS, ids=["pooled", "depthwise", "grouped", "upsampled", "dense"])
def test_training(laid_out, build):
    _compare(_step("lazy", build, None), _step("cpu", build, None), rtol=1e-4, atol=1e-5)
    assert any(_laid(graph) for graph in laid_out)


def test_training_under_autocast(laid_out):
    _compare(_step("lazy", _pooled, torch.bfloat16), _step("cpu", _pooled, torch.bfloat16), rtol=5e-2, atol=5e-2)
    (graph,) = [graph for graph in laid_out if any(node.target is ops.convolution_backward for node in graph.nodes)]
    for node in _laid(graph):
        copies = [
            x for x in node.args if x.target is ops.convert and x.args[0].meta["val"].dtype == x.meta["val"].dtype
        ]
        assert not copies, "what computes an operand writes it channels-last"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("build", BUILDS, ids=["pooled", "depthwise", "grouped", "upsampled", "dense"])
def test_a_compiled_modules_halves(laid_out, build, dtype):
    torch.manual_seed(0)
    eager = build()
    ours = copy.deepcopy(eager)
    compiled = torchlazy.compile(ours)
    for _ in range(5):
        found, wanted = [], []
        for call, model, values in ((compiled, ours, found), (eager, eager, wanted)):
            torch.manual_seed(1)
            x = torch.randn(2, 3, 12, 12).requires_grad_()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out = call(x)
            out.float().square().mean().backward()
            result = [out.detach().float(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
            values += [(t.clone(), t.stride()) for t in result]
            model.zero_grad()
        _compare(found, wanted, **({"rtol": 1e-4, "atol": 1e-5} if dtype is None else {"rtol": 5e-2, "atol": 5e-2}))
    assert compiled.report().replays, compiled.report()
    backward = [g for g in laid_out if any(n.target is ops.convolution_backward for n in g.nodes)]
    assert backward and all(map(_laid, backward)), "gradients are computed channels-last"
    for graph in laid_out:
        for node in _laid(graph):
            assert not any(map(_is_copied_saved, node.args)), "saved values cross in the layout that both halves want"


def _is_copied_saved(x) -> bool:
    """Whether this is a copy in another layout of something computed that the program was given: no image or weight."""
    if not isinstance(x, fx.Node) or x.target is not ops.convert or x.args[0].op != "placeholder":
        return False
    meta, given = x.meta["val"], x.args[0].meta["val"]
    return given.dtype == meta.dtype and meta.shape[0] == 2 and meta.shape[1] > 3


def _laid(graph):
    """The convolutions all of whose operands and results lie channels-last."""
    found = []
    for node in graph.nodes:
        if node.target not in (ops.convolution, ops.convolution_backward):
            continue
        results = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
        metas = [operand.meta["val"] for operand in node.args if operand.meta["val"].rank == 4]
        if all(
            stage._lies_channels_last(meta) for meta in (*metas, *(m for m in results if m is not None and m.rank == 4))
        ):
            found.append(node)
    return found


def test_values_that_leave_the_program_lie_as_eager_lays_them(laid_out):
    torch.manual_seed(0)
    conv, other = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 3)
    x = torch.randn(2, 4, 9, 9)

    def run(device):
        a, b = conv.to(device), other.to(device)
        with torch.no_grad():
            first = a(x.to(device) * 2)
            middle = F.relu(first)
            seen = middle.transpose(1, 2)
            sorted_ = middle.sort(dim=3)[0]
            window = middle.as_strided((2, 6, 7), (294, 49, 1), 3)
            results = (first, seen, sorted_, window.clone(), b(middle * 2))
            return [(t.cpu(), t.stride()) for t in results]

    wanted = run("cpu")
    _compare(run("lazy"), wanted, rtol=1e-4, atol=1e-5)
    assert any(_laid(graph) for graph in laid_out)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 4, 1, 1), (0, 4, 8, 8)])
def test_layouts_that_shapes_do_not_tell_apart_stay(laid_out, shape):
    torch.manual_seed(0)
    conv = nn.Conv2d(shape[1], 4, 3, padding=1)
    x = torch.randn(shape)
    wanted = conv(x).relu()
    found = conv.to("lazy")(x.to("lazy")).relu()
    torch.testing.assert_close(found.detach().cpu(), wanted.detach())
    assert not any(_laid(graph) and shape[1] == 1 for graph in laid_out)
    assert all(stage.channels_last_convolutions(graph, device="cuda") is graph for graph in laid_out)


def test_a_convolution_by_itself_stays(laid_out):
    conv = nn.Conv2d(4, 4, 3).to("lazy")
    with torch.no_grad():
        conv.bias = None
        conv(torch.randn(2, 4, 8, 8).to("lazy")).cpu()
    assert not any(_laid(graph) for graph in laid_out)


@pytest.mark.parametrize(
    ("depthwise", "training"), [(True, False), (False, False), (True, True), (True, "norms are frozen")]
)
def test_on_the_cpu_depthwise_inference_alone_is_laid_out(monkeypatch, depthwise, training):
    seen = []

    def lay_out(graph):
        seen.append((graph, stage.channels_last_convolutions(graph)))
        return seen[-1][1]

    monkeypatch.setattr(pipeline, "channels_last_convolutions", lay_out)
    model = _pooled(8 if depthwise else 1).train(training is True)
    x = torch.randn(2, 3, 24, 24)
    with torch.set_grad_enabled(bool(training)):
        wanted = copy.deepcopy(model)(x)
        compiled = torchlazy.compile(model)
        for found in (compiled(x) for _ in range(1 if training else 3)):
            torch.testing.assert_close(found, wanted)
            assert found.stride() == wanted.stride()
    graphs = [pair for pair in seen if any(node.target is ops.convolution for node in pair[0].nodes)]
    assert graphs
    for before, after in graphs:
        verify(after, PRIMS)
        assert (after is not before) is (depthwise and not training)
