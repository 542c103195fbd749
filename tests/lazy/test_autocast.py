"""`torch.autocast("lazy")`: the dtypes that torch's own CUDA autocast gives, operator by operator and in a model.

The oracle is torch's autocast itself, asked through a tensor subclass that claims CUDA and computes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.lazy.compare import data, ints
from tests.lazy.models import built, same

pytestmark = pytest.mark.usefixtures("device_in_python")

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


class Claimed(torch.Tensor):
    """A tensor that says that it is on CUDA; its operators run on the meta device."""

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> Claimed:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), dtype=real.dtype, device="cuda", requires_grad=real.requires_grad
        )
        made.inner = real.detach().to("meta")
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("meta")
            return value.inner if isinstance(value, Claimed) else value

        args, kwargs = pytree.tree_map(inner, (args, kwargs or {}))
        return pytree.tree_map(lambda v: Claimed(v) if isinstance(v, torch.Tensor) else v, func(*args, **kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast("cuda")`, also where there is no CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def dtypes(value: Any) -> Any:
    return [v.dtype for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


x, y, z = (data("cpu", 4, 4, seed=s) for s in range(3))
image, kernel = data("cpu", 1, 2, 6, 6), data("cpu", 3, 2, 3, 3)
labels = ints("cpu", 4, high=4)
sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
index = torch.tensor([0, 2])

OPERATORS: dict[str, tuple[Any, ...]] = {
    # lower precision
    "matmul": (torch.matmul, x, y),
    "mm": (torch.mm, x, y),
    "mv": (torch.mv, x, sign),
    "bmm": (torch.bmm, x[None], y[None]),
    "addmm": (torch.addmm, z, x, y),
    "addmv": (torch.addmv, sign, x, sign),
    "addr": (torch.addr, z, sign, sign),
    "baddbmm": (torch.baddbmm, z[None], x[None], y[None]),
    "addbmm": (torch.addbmm, z, x[None], y[None]),
    "chain_matmul": (torch.linalg.multi_dot, [x, y, z]),
    "vecdot": (torch.linalg.vecdot, x, y),
    "linear": (F.linear, x, y, sign),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), x, y),
    "einsum outer": (lambda a, b: torch.einsum("i,j->ij", a, b), sign, sign),
    "conv1d": (F.conv1d, x[None], data("cpu", 2, 4, 3)),
    "conv2d": (F.conv2d, image, kernel),
    "conv2d same": (lambda a, b: F.conv2d(a, b, padding="same"), image, kernel),
    "conv3d": (F.conv3d, image[None], kernel[:, :1, None]),
    "conv_transpose2d": (F.conv_transpose2d, image, data("cpu", 2, 3, 3, 3)),
    "prelu": (F.prelu, x, sign),
    "attention": (F.scaled_dot_product_attention, x[None, None], y[None, None], z[None, None]),
    "lstm_cell": (lambda a, b, c: torch.lstm_cell(a, (a, a), c, c), x, y, data("cpu", 16, 4)),
    "matmul of float64": (torch.matmul, x.double(), y.double()),
    "matmul of integers": (torch.matmul, labels, labels),
    # float32
    "exp": (torch.exp, x.to(BF16)),
    "log": (torch.log, x.abs().to(BF16)),
    "log1p": (torch.log1p, x.abs().to(BF16)),
    "acos": (torch.acos, x.tanh().to(BF16)),
    "cosh": (torch.cosh, x.to(BF16)),
    "erfinv": (torch.erfinv, x.tanh().to(BF16)),
    "expm1": (torch.expm1, x.to(BF16)),
    "reciprocal": (torch.reciprocal, x.to(BF16)),
    "rsqrt": (torch.rsqrt, x.abs().to(BF16)),
    "tan": (torch.tan, x.to(BF16)),
    "pow": (torch.pow, x.to(BF16), 2),
    "pow tensor": (torch.pow, x.abs().to(BF16), y.to(BF16)),
    "rpow": (lambda a: 2**a, x.to(BF16)),
    "softplus": (F.softplus, x.to(BF16)),
    "layer_norm": (lambda a: F.layer_norm(a, (4,)), x.to(BF16)),
    "rms_norm": (lambda a: F.rms_norm(a, (4,)), x.to(BF16)),
    "group_norm": (lambda a: F.group_norm(a, 2), image.to(BF16)),
    "batch_norm": (lambda a: F.batch_norm(a, None, None, training=True), x),
    "norm": (torch.norm, x.to(BF16)),
    "norm dim": (lambda a: a.norm(dim=1), x.to(BF16)),
    "vector norm": (torch.linalg.vector_norm, x.to(BF16)),
    "matrix norm": (torch.linalg.matrix_norm, x.to(BF16)),
    "normalize": (F.normalize, x.to(BF16)),
    "cosine_similarity": (F.cosine_similarity, x.to(BF16), y.to(BF16)),
    "softmax": (lambda a: a.softmax(1), x.to(BF16)),
    "softmax dtype": (lambda a: a.softmax(1, dtype=torch.float64), x.to(BF16)),
    "log_softmax": (lambda a: F.log_softmax(a, 1), x.to(BF16)),
    "softmin": (lambda a: F.softmin(a, 1), x.to(BF16)),
    "sum": (torch.sum, x.to(BF16)),
    "sum dim": (lambda a: a.sum(1), x.to(BF16)),
    "sum dtype": (lambda a: a.sum(1, dtype=BF16), x.to(BF16)),
    "sum of integers": (torch.sum, labels),
    "mean": (torch.mean, x.to(BF16)),
    "prod": (torch.prod, x.to(BF16)),
    "cumsum": (lambda a: a.cumsum(0), x.to(BF16)),
    "cumprod": (lambda a: a.cumprod(0), x.to(BF16)),
    "logsumexp": (lambda a: a.logsumexp(1), x.to(BF16)),
    "dist": (torch.dist, x.to(BF16), y.to(BF16)),
    "cdist": (torch.cdist, x.to(BF16), y.to(BF16)),
    "renorm": (lambda a: a.renorm(2, 0, 1.0), x.to(BF16)),
    "interpolate": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), image.to(BF16)),
    "nll_loss": (F.nll_loss, x.to(BF16), labels),
    "cross_entropy": (F.cross_entropy, x.to(BF16), labels),
    "cross_entropy smoothed": (lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1), x.to(BF16), labels),
    "mse_loss": (F.mse_loss, x.to(BF16), y.to(BF16)),
    "l1_loss": (F.l1_loss, x.to(BF16), y.to(BF16)),
    "smooth_l1_loss": (F.smooth_l1_loss, x.to(BF16), y.to(BF16)),
    "huber_loss": (F.huber_loss, x.to(BF16), y.to(BF16)),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="sum"), x.to(BF16), y.to(BF16)),
    "bce_logits": (F.binary_cross_entropy_with_logits, x.to(BF16), y.sigmoid().to(BF16)),
    "soft_margin": (F.soft_margin_loss, x.to(BF16), y.sign().to(BF16)),
    "triplet": (F.triplet_margin_loss, x.to(BF16), y.to(BF16), z.to(BF16)),
    "poisson": (F.poisson_nll_loss, x.to(BF16), y.abs().to(BF16)),
    "cosine_embedding": (F.cosine_embedding_loss, x.to(BF16), y.to(BF16), sign),
    "hinge_embedding": (F.hinge_embedding_loss, x.to(BF16), y.sign()),
    "margin_ranking": (F.margin_ranking_loss, sign.to(BF16), sign.to(BF16), sign),
    "multi_margin": (F.multi_margin_loss, x.to(BF16), labels),
    # widest
    "addcmul": (torch.addcmul, x, y.to(BF16), z.to(BF16)),
    "addcdiv": (torch.addcdiv, x.to(BF16), y, z.to(BF16)),
    "atan2": (torch.atan2, x, y.to(BF16)),
    "bilinear": (F.bilinear, x.to(BF16), y, data("cpu", 2, 4, 4)),
    "cross": (lambda a, b: torch.cross(a, b, dim=1), x[:, :3], y[:, :3].to(BF16)),
    "dot": (torch.dot, sign, sign.to(BF16)),
    "vdot": (torch.vdot, sign, sign.to(BF16)),
    "cat": (torch.cat, [x, y.to(BF16)]),
    "stack": (torch.stack, [x, y.to(BF16)]),
    "cat of halves": (torch.cat, [x.to(BF16), y.to(BF16)]),
    "grid_sample": (lambda a, g: F.grid_sample(a, g, align_corners=False), image, torch.zeros(1, 2, 2, 2, dtype=BF16)),
    "index_put": (lambda a, b, i: a.index_put((i,), b), x, y[:2].to(BF16), index),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), x, y.to(BF16)),
    "scatter_add": (lambda a, b, i: a.scatter_add(0, i[:, None], b), x, y.to(BF16), index),
    # neither list
    "add": (torch.add, x.to(BF16), y.to(BF16)),
    "add mixed": (torch.add, x.to(BF16), y),
    "relu": (F.relu, x.to(BF16)),
    "gelu": (F.gelu, x.to(BF16)),
    "sqrt": (torch.sqrt, x.abs().to(BF16)),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2), image.to(BF16)),
    "dropout": (F.dropout, x.to(BF16)),
    "embedding": (F.embedding, labels, x),
}  # fmt: skip


# Operators that ask CUDA itself, which the pretender has not got: what the documentation says (None: the given dtype).
DOCUMENTED: dict[str, Any] = {
    "lstm_cell": [None, None], "rms_norm": [FLOAT], "batch_norm": [FLOAT], "cosine_similarity": [FLOAT],
    "softmax": [FLOAT], "softmax dtype": [torch.float64], "log_softmax": [FLOAT], "softmin": [FLOAT],
    "cross_entropy": [FLOAT], "cross_entropy smoothed": [FLOAT], "scatter_add": [FLOAT],
}  # fmt: skip


def on_lazy(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.to("lazy") if isinstance(v, torch.Tensor) else v, value)


def claimed(value: Any) -> Any:
    return pytree.tree_map(lambda v: Claimed(v) if isinstance(v, torch.Tensor) else v, value)


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_dtype_is_that_of_cuda_autocast(name, dtype):
    function, *arguments = OPERATORS[name]
    if dtype == HALF:
        arguments = pytree.tree_map(
            lambda v: v.half() if isinstance(v, torch.Tensor) and v.dtype == BF16 else v, arguments
        )
    if name in DOCUMENTED:
        want = [found or dtype for found in DOCUMENTED[name]]
    else:
        with cuda_autocast(dtype):
            want = dtypes(function(*claimed(arguments)))
    with torch.autocast("lazy", dtype=dtype):
        have = function(*on_lazy(arguments))
    assert dtypes(have) == want


def test_binary_cross_entropy_is_refused():
    with torch.autocast("lazy"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x.sigmoid().to("lazy"), y.sigmoid().to("lazy"))


def test_defaults_and_queries():
    assert torch.amp.is_autocast_available("lazy")
    assert not torch.is_autocast_enabled("lazy")
    with torch.autocast("lazy"):
        assert torch.is_autocast_enabled("lazy") and torch.get_autocast_dtype("lazy") == BF16
        with torch.autocast("lazy", dtype=HALF):
            assert torch.get_autocast_dtype("lazy") == HALF
            assert torch.mm(x.to("lazy"), y.to("lazy")).dtype == HALF
            with torch.autocast("lazy", enabled=False):
                assert torch.mm(x.to("lazy"), y.to("lazy")).dtype == FLOAT
        assert torch.mm(x.to("lazy"), y.to("lazy")).dtype == BF16
        assert torch.mm(x, y).dtype == FLOAT  # the CPU has an autocast of its own
    assert torch.mm(x.to("lazy"), y.to("lazy")).dtype == FLOAT
    with pytest.raises(RuntimeError), torch.autocast("lazy"):
        raise RuntimeError
    assert not torch.is_autocast_enabled("lazy")


def test_cpu_autocast_does_not_reach_lazy_tensors():
    with torch.autocast("cpu", dtype=BF16):
        assert torch.mm(x.to("lazy"), y.to("lazy")).dtype == FLOAT
        assert torch.mm(x, y).dtype == BF16


def test_decorator_and_amp_object():
    @torch.autocast("lazy", dtype=HALF)
    def f(a, b):
        return a @ b

    assert f(x.to("lazy"), y.to("lazy")).dtype == HALF
    with torch.amp.autocast("lazy", dtype=BF16):
        assert (x.to("lazy") @ y.to("lazy")).dtype == BF16
    assert not torch.is_autocast_enabled("lazy")


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=["bfloat16", "float16"])
def test_forward_and_backward_of_a_model(dtype, compiled):
    """Dtypes of activations and gradients as in CUDA autocast; values near float32's."""

    def run(device):
        model = built(lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), "cpu")
        found: dict[str, Any] = {}
        if device == "lazy":
            model.to("lazy")
        inputs = data("cpu", 4, 4)
        inputs = inputs.to("lazy") if device == "lazy" else inputs
        target = labels.to("lazy") if device == "lazy" else labels
        inputs.requires_grad_()
        scope = torch.autocast("lazy", dtype=dtype) if device == "lazy" else torch.autocast("cpu", enabled=False)
        with scope:
            hidden = inputs
            for position, layer in enumerate(model):
                hidden = layer(hidden)
                found[f"out{position}"] = hidden.dtype
                hidden.register_hook(lambda g, position=position: found.__setitem__(f"grad{position}", g.dtype))
            loss = F.cross_entropy(hidden, target)
        loss.backward()
        found["parameters"] = {p.grad.dtype for p in model.parameters()}
        return loss, inputs.grad, [p.grad for p in model.parameters()], found

    *have, found = run("lazy")
    assert found == {
        "out0": dtype, "out1": dtype, "out2": FLOAT, "out3": dtype,
        "grad0": dtype, "grad1": dtype, "grad2": FLOAT, "grad3": dtype, "parameters": {FLOAT},
    }  # fmt: skip
    same(have, run("cpu")[:3], rtol=0.1, atol=0.03)


def test_training_step_is_one_program(compiled):
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), "lazy")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(5):
        if step == 2:
            torchlazy.reset_metrics()
        optimizer.zero_grad()
        with torch.autocast("lazy"):
            loss = F.cross_entropy(model(x.to("lazy")), labels.to("lazy"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    counts = torchlazy.metrics()
    assert counts["cuts"] == {"optimizer step": 3} and counts["hits"] == 3
    assert losses[-1].item() < losses[0].item()


def test_grad_scaler_with_half(compiled):
    model = built(lambda: nn.Linear(4, 4), "lazy")
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    scaler = torch.amp.GradScaler("lazy", init_scale=2.0**18, growth_interval=100)
    before = [p.detach().clone() for p in model.parameters()]
    scales = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("lazy", dtype=HALF):
            loss = (model(x.to("lazy")) * 10).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] < 2.0**18  # the first gradients overflow half precision: that step is skipped
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_custom_function_casts():
    seen = []

    class F32(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="lazy", cast_inputs=FLOAT)
        def forward(ctx, a, b):
            seen.append((a.dtype, torch.is_autocast_enabled("lazy"), (a @ b).dtype))
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="lazy")
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            seen.append((g.dtype, torch.is_autocast_enabled("lazy")))
            return g @ b.t(), a.t() @ g

    a, b = (t.to("lazy").to(HALF).requires_grad_() for t in (x, y))
    with torch.autocast("lazy", dtype=HALF):
        out = F32.apply(a, b)
    out.sum().backward()
    assert out.dtype == FLOAT and a.grad.dtype == HALF
    assert seen == [(FLOAT, False, FLOAT), (FLOAT, False)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_restores_autocast(reentrant, compiled):
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), "lazy")
    seen = []
    model[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))

    def run(wrapped):
        model.zero_grad()
        inputs = x.to("lazy").requires_grad_()
        with torch.autocast("lazy"):
            out = checkpoint(model, inputs, use_reentrant=reentrant) if wrapped else model(inputs)
        out.float().square().sum().backward()
        return out, inputs.grad, [p.grad for p in model.parameters()]

    same(run(True), run(False), rtol=1e-2, atol=1e-3)
    assert seen == [BF16, BF16, BF16]  # forward, forward again in the backward, and the plain run


def test_weight_used_twice_gets_both_gradients(compiled):
    w = y.to("lazy").requires_grad_()
    with torch.autocast("lazy"):
        out = (x.to("lazy") @ w) @ w
    out.sum().backward()
    wide = y.clone().requires_grad_()
    ((x @ wide) @ wide).sum().backward()
    assert w.grad.dtype == FLOAT
    same(w.grad, wide.grad, rtol=0.05, atol=0.1)
