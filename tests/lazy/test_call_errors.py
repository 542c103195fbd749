"""Wrong calls raise at the call: eager's type, a message that says as much, as functions, methods and in place.

Each call is made four ways: at first sight; where the recorder follows a trace that it knows and comes to the wrong
call in place of a right one; again after that; and inside of a compiled function. Nothing is synchronised on the way.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torch.nn import functional as F

WrongCall = Callable[[Tensor], Any]


def _like(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=x.device)


def _ints(x: Tensor, *values: int) -> Tensor:
    return torch.zeros(len(values), dtype=torch.int64, device=x.device)


# x: float32 [3, 4]
CALLS: dict[str, WrongCall] = {
    # shapes
    "add": lambda x: torch.add(x, _like(x, 5)),
    "add operator": lambda x: x + _like(x, 2, 4),
    "add method": lambda x: x.add(_like(x, 3)),
    "add in place": lambda x: x.add_(_like(x, 3, 5)),
    "add in place grows": lambda x: x.add_(_like(x, 2, 3, 4)),
    "mul in place": lambda x: x.mul_(_like(x, 4, 3)),
    "iadd": lambda x: x.__iadd__(_like(x, 7)),
    "sub foreach": lambda x: torch._foreach_sub([x, x], [_like(x, 3, 4), _like(x, 5)]),
    "foreach lengths": lambda x: torch._foreach_add([x, x], [x]),
    "where": lambda x: torch.where(x > 0, x, _like(x, 5)),
    "where condition": lambda x: torch.where(x, x, x),
    "maximum": lambda x: torch.maximum(x, _like(x, 2, 2)),
    "lerp": lambda x: x.lerp(_like(x, 5), 0.5),
    "addcmul": lambda x: torch.addcmul(x, _like(x, 5), _like(x, 3)),
    # dtypes
    "difference of a truth value": lambda x: torch.sub(x, True),
    "difference of truth values": lambda x: torch.rsub(x > 0, x),
    "difference of integers and truth values": lambda x: x.int() - (x > 0),
    "heaviside of complex numbers": lambda x: torch.heaviside(x.cfloat(), x.cfloat()),
    "argmax of a truth value": lambda x: (x[0, 0] > 0).argmax(),
    "fill too large": lambda x: x.to(torch.int8).masked_fill(x > 0, 1 << 31),
    "full too large": lambda x: torch.full((2,), 300, dtype=torch.uint8, device=x.device),
    "scalar tensor too large": lambda x: torch.scalar_tensor(300, dtype=torch.int8, device=x.device),
    "where too large": lambda x: torch.where(x > 0, x.to(torch.int8), 300),
    "pad too large": lambda x: F.pad(x.to(torch.int8), (1, 1), value=300),
    "range of truth values": lambda x: torch.arange(3, dtype=torch.bool, device=x.device),
    "linspace of truth values": lambda x: torch.linspace(0, 1, 3, dtype=torch.bool, device=x.device),
    "negative power of truth values": lambda x: (x > 0) ** -1,
    "shift of uint16": lambda x: x.to(torch.uint16) << x.to(torch.uint16),
    "promotion of uint16": lambda x: torch.cat([x.to(torch.uint16), x.long()]),
    "logic on uint16": lambda x: torch.logical_or(x.to(torch.uint16), x.long()),
    "positions among truth values": lambda x: torch.searchsorted(x[0] > 0, x[0] > 0),
    "contained in truth values": lambda x: torch.isin(x > 0, 0.5),
    "positions in a number": lambda x: torch.index_select(x[0, 0], 0, _ints(x, 0, 0)),
    "mean pooling without divisor": lambda x: F.avg_pool2d(x[None], 2, divisor_override=0),
    "mean pooling of volumes without divisor": lambda x: F.avg_pool3d(x[None, None], (1, 2, 2), divisor_override=0),
    "histogram of complex numbers": lambda x: torch.histc(x.cfloat()),
    # ranks
    "batch norm of a vector": lambda x: torch.nn.functional.batch_norm(x[0], None, None, training=True),
    "adaptive pool of nothing": lambda x: torch.nn.functional.adaptive_avg_pool1d(x[:, :0], 2),
    "mm": lambda x: torch.mm(x, x),
    "mm rank": lambda x: torch.mm(x, _like(x, 4)),
    "matmul": lambda x: x @ _like(x, 3, 4),
    "matmul 0-dim": lambda x: torch.matmul(x, x.sum()),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "bmm rank": lambda x: torch.bmm(x, x),
    "mv": lambda x: torch.mv(x, _like(x, 3)),
    "dot": lambda x: torch.dot(x, x),
    "dot lengths": lambda x: torch.dot(x[0], x[:, 0]),
    "addmm": lambda x: torch.addmm(x, x, _like(x, 4, 5)),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "einsum text": lambda x: torch.einsum("ij,->", x),
    "linear": lambda x: F.linear(x, _like(x, 2, 5)),
    "conv1d channels": lambda x: F.conv1d(x[None], _like(x, 2, 4, 3)),
    "conv2d rank": lambda x: F.conv2d(x, _like(x, 2, 3, 3, 3)),
    "conv2d kernel": lambda x: F.conv2d(x[None, None], _like(x, 1, 1, 7, 7)),
    "conv1d groups": lambda x: F.conv1d(x[None], _like(x, 2, 1, 3), groups=2),
    "cat": lambda x: torch.cat([x, _like(x, 3, 5)]),
    "cat of nothing": lambda x: torch.cat([]),
    "cat dim": lambda x: torch.cat([x, x], 2),
    "stack": lambda x: torch.stack([x, x[:2]]),
    "view": lambda x: x.view(5, 2),
    "view of strided": lambda x: x.t().view(12),
    "view two unknown": lambda x: x.view(-1, -1),
    "reshape": lambda x: x.reshape(7),
    "reshape unknown": lambda x: x.reshape(-1, 5),
    "expand": lambda x: x.expand(2, 4),
    "expand fewer": lambda x: x.expand(4),
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, 5)),
    "permute": lambda x: x.permute(0, 0),
    "permute count": lambda x: x.permute(0),
    "transpose": lambda x: x.transpose(0, 2),
    "t": lambda x: x[None].t(),
    "squeeze": lambda x: x.squeeze(3),
    "unsqueeze": lambda x: x.unsqueeze(4),
    "flatten": lambda x: x.flatten(1, 0),
    "unflatten": lambda x: x.unflatten(1, (3, 3)),
    "split": lambda x: x.split([1, 1]),
    "chunk": lambda x: x.chunk(0),
    "narrow": lambda x: x.narrow(0, 2, 5),
    "select": lambda x: x.select(0, 3),
    "item of many": lambda x: x[5],
    "too many indices": lambda x: x[0, 0, 0],
    "slice step": lambda x: x[::-1],
    "unfold": lambda x: x.unfold(0, 5, 1),
    "as_strided": lambda x: x.as_strided((2,), (1, 1)),
    "diagonal": lambda x: x.diagonal(0, 1, 1),
    "movedim": lambda x: x.movedim((0, 1), (0, 0)),
    "roll": lambda x: x.roll((1, 2), (0,)),
    "flip": lambda x: x.flip(0, 0),
    "repeat": lambda x: x.repeat(2),
    "tile": lambda x: x.repeat_interleave(_ints(x, 1, 1), 0),
    "pad": lambda x: F.pad(x, (1, 1, 1)),
    "pad reflect": lambda x: F.pad(x[None], (9, 9), mode="reflect"),
    "masked_fill": lambda x: x.masked_fill(_like(x, 5, dtype=torch.bool), 0.0),
    "masked_fill mask": lambda x: x.masked_fill(x, 0.0),
    "masked_fill value": lambda x: x.masked_fill(x > 0, x),
    "masked_fill in place": lambda x: x.masked_fill_(_like(x, 2, 3, 4, dtype=torch.bool), 0.0),
    "copy": lambda x: x.copy_(_like(x, 5)),
    "setitem": lambda x: x.__setitem__(slice(0, 2), _like(x, 3, 4)),
    "setitem mask": lambda x: x.__setitem__(_like(x, 5, dtype=torch.bool), 1.0),
    "triu": lambda x: torch.triu(x[0]),
    "cross": lambda x: torch.linalg.cross(x, x, dim=1),
    # dimensions of reductions and scans
    "sum": lambda x: x.sum(2),
    "sum twice": lambda x: x.sum((0, 0)),
    "mean": lambda x: x.mean(-3),
    "amax": lambda x: torch.amax(x, 5),
    "max": lambda x: x.max(2),
    "argmax": lambda x: x.argmax(2),
    "max of nothing": lambda x: x[:0].max(),
    "amax of nothing": lambda x: x[:0].amax(0),
    "argmax of nothing": lambda x: x[:0].argmax(0),
    "softmax": lambda x: x.softmax(2),
    "log_softmax": lambda x: F.log_softmax(x, -3),
    "cumsum": lambda x: x.cumsum(2),
    "sort": lambda x: x.sort(2),
    "topk": lambda x: x.topk(9),
    "kthvalue": lambda x: x.kthvalue(9),
    "std": lambda x: x.std(4),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=3),
    "logsumexp": lambda x: x.logsumexp(2),
    "all": lambda x: x.all(3),
    "median": lambda x: x.median(2),
    # dtypes
    "bitwise_and of floats": lambda x: x & x,
    "bitwise_not of floats": lambda x: ~x,
    "shift of floats": lambda x: torch.bitwise_left_shift(x, x),
    "mm dtypes": lambda x: torch.mm(x, x.double().t()),
    "linear dtypes": lambda x: F.linear(x, x.half()),
    "bmm dtypes": lambda x: torch.bmm(x[None], x.t().long()[None]),
    "in place narrows": lambda x: x.long().add_(1.5),
    "in place int by float": lambda x: x.long().mul_(x),
    "in place bool": lambda x: (x > 0).add_(1),
    "in place div of ints": lambda x: x.long().div_(2),
    "mean of ints": lambda x: x.long().mean(),
    "softmax of ints": lambda x: torch.ops.aten._softmax(x.long(), 0, False),
    "var of ints": lambda x: x.long().var(),
    "neg of bool": lambda x: -(x > 0),
    "sub of bools": lambda x: (x > 0) - (x > 1),
    "pow to a negative": lambda x: x.long() ** -2,
    "exp in place of ints": lambda x: x.long().exp_(),
    "lerp dtypes": lambda x: x.lerp(x.double(), 0.5),
    "cross_entropy of ints": lambda x: F.cross_entropy(x.long(), _ints(x, 0, 0, 0)),
    "layer_norm shape": lambda x: F.layer_norm(x, (5,)),
    "layer_norm weight": lambda x: F.layer_norm(x, (4,), _like(x, 5)),
    "batch_norm": lambda x: F.batch_norm(x, _like(x, 5), _like(x, 5)),
    "batch_norm one value": lambda x: F.batch_norm(x[:1], None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 3),
    "dropout p": lambda x: F.dropout(x, 1.5),
    "clamp of nothing": lambda x: x.clamp(),
    "arange": lambda x: torch.arange(0, 5, -1, device=x.device),
    "empty negative": lambda x: torch.empty(-1, device=x.device),
    "full": lambda x: torch.full((2, -2), 1.0, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, -2, device=x.device),
    "eye": lambda x: torch.eye(-1, device=x.device),
    "one_hot of floats": lambda x: F.one_hot(x),
    # positions
    "gather dtype": lambda x: x.gather(0, x),
    "gather rank": lambda x: x.gather(0, _ints(x, 0)),
    "gather dim": lambda x: x.gather(2, x.long()),
    "gather shape": lambda x: x.gather(0, _like(x, 3, 9, dtype=torch.int64)),
    "scatter dtype": lambda x: x.scatter(0, x, 1.0),
    "scatter src dtype": lambda x: x.scatter(0, x.long(), x.double()),
    "scatter shape": lambda x: x.scatter(0, _like(x, 3, 9, dtype=torch.int64), _like(x, 3, 9)),
    "scatter in place": lambda x: x.scatter_(3, x.long(), 1.0),
    "scatter_add": lambda x: x.scatter_add(0, x.long(), x.double()),
    "scatter_reduce": lambda x: x.scatter_reduce(0, x.long(), x, "median"),
    "index_select dtype": lambda x: x.index_select(0, x[0]),
    "index_select rank": lambda x: x.index_select(0, x.long()),
    "index_select dim": lambda x: x.index_select(2, _ints(x, 0)),
    "index_add": lambda x: x.index_add(0, _ints(x, 0, 0), x),
    "index_copy": lambda x: x.index_copy(0, _ints(x, 0), _like(x, 2, 4)),
    "index_fill": lambda x: x.index_fill(0, x.long(), 1.0),
    "index by floats": lambda x: x[x],
    "index shapes": lambda x: x[_ints(x, 0, 0), _ints(x, 0, 0, 0)],
    "index mask": lambda x: x[_like(x, 4, dtype=torch.bool)],
    "index_put": lambda x: x.index_put((_ints(x, 0, 0),), _like(x, 3, 5)),
    "index_put dtype": lambda x: x.index_put((_ints(x, 0),), x[0].double()),
    "embedding": lambda x: F.embedding(x, x),
    "embedding rank": lambda x: F.embedding(x.long(), x[0]),
    "take": lambda x: x.take(x),
    "take_along_dim": lambda x: x.take_along_dim(x, 0),
    "nll_loss batch": lambda x: F.nll_loss(x, _ints(x, 0)),
    "nll_loss target": lambda x: F.nll_loss(x, x),
    "cross_entropy batch": lambda x: F.cross_entropy(x, _ints(x, 0)),
    "cross_entropy weight": lambda x: F.cross_entropy(x, _ints(x, 0, 0, 0), weight=x),
    "mse_loss": lambda x: F.mse_loss(x, _like(x, 2, 2)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, _like(x, 3)),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, _like(x, 3)),
    "kl_div reduction": lambda x: F.kl_div(x, x, reduction="median"),
    "searchsorted": lambda x: torch.searchsorted(x, _like(x, 2, 2)),
    "bucketize": lambda x: torch.bucketize(x, x),
    # windows
    "max_pool2d kernel": lambda x: F.max_pool2d(x[None], 7),
    "max_pool2d padding": lambda x: F.max_pool2d(x[None], 2, padding=2),
    "max_pool1d rank": lambda x: F.max_pool1d(x[0], 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x[None], 2, stride=0),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[0], 2),
    "interpolate": lambda x: F.interpolate(x[None], size=(2, 2, 2)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x[None, None], 2),
    "grid_sample": lambda x: F.grid_sample(x[None, None], _like(x, 1, 2, 2, 3)),
    # out=
    "out dtype": lambda x: torch.add(x, x, out=_like(x, 3, 4, dtype=torch.int64)),
    "out of a mean": lambda x: torch.mean(x, 0, out=_like(x, 4, dtype=torch.int64)),
    "out dtype of mm": lambda x: torch.mm(x, x.t(), out=_like(x, 3, 3, dtype=torch.float64)),
    "out of exp": lambda x: torch.exp(x, out=_like(x, 3, 4, dtype=torch.bool)),
    "out expanded": lambda x: torch.add(x, x, out=_like(x, 1, 4).expand(3, 4)),
    "out of cat": lambda x: torch.cat([x, x], out=_like(x, 6, 4, dtype=torch.int64)),
    "out of a list": lambda x: torch.max(x, 0, out=(_like(x, 4), _like(x, 4))),
    # memory
    "in place on expanded": lambda x: x[:1].expand(3, 4).add_(1),
    "copy to expanded": lambda x: x[:1].expand(3, 4).copy_(x),
    "fill of expanded": lambda x: x[:1].expand(3, 4).mul_(2.0),
    "in place on a leaf": lambda x: x.clone().requires_grad_().add_(1),
    "in place on a leaf's view": lambda x: x.clone().requires_grad_()[0].add_(1),
    "requires_grad of ints": lambda x: x.long().requires_grad_(),
    "backward of many": lambda x: (x.clone().requires_grad_() * 2).backward(),
    "backward without a graph": lambda x: x.sum().backward(),
    "numpy of a leaf": lambda x: x.clone().requires_grad_().numpy(),
    "bool of many": lambda x: bool(x),
    "float of many": lambda x: float(x),
    "len of 0-dim": lambda x: len(x.sum()),
    "iterate 0-dim": lambda x: list(x.sum()),
    # names and kinds
    "type": lambda x: torch.add(x, "a"),
    "missing": lambda x: torch.add(x),
    "keyword": lambda x: torch.add(x, x, beta=2),
    "dtype name": lambda x: x.to("float33"),
    "device name": lambda x: x.to("nowhere"),
    "rounding_mode": lambda x: torch.div(x, x, rounding_mode="up"),
    "list of lists": lambda x: torch.stack(x.sum()),
    "reduction": lambda x: F.mse_loss(x, x, reduction="median"),
    "view dtype": lambda x: x[:, :3].view(torch.float64),
    "complex": lambda x: torch.complex(x, x.double()),
    "polygamma": lambda x: torch.polygamma(-1, x),
    "multinomial": lambda x: torch.multinomial(x.long(), 2),
    "bernoulli": lambda x: torch.bernoulli(x.long()),
    "normal": lambda x: torch.normal(x, _like(x, 5)),
    "rand_like of ints": lambda x: torch.rand_like(x.long()),
    "rand of ints": lambda x: torch.rand(3, dtype=torch.int64, device=x.device),
    "softmax of 0-dim": lambda x: x.sum().softmax(1),
    "cdist of halves": lambda x: torch.cdist(x.half(), x.half()),
    "cdist of two dtypes": lambda x: torch.cdist(x.double(), x),
    "cross of two dtypes": lambda x: torch.linalg.cross(x[:3].long(), x[:3], dim=0),
    "rfft of halves": lambda x: torch.fft.rfft(x.half()),
    "group norm of two dtypes": lambda x: F.group_norm(x[None].double(), 1, _like(x, 3), _like(x, 3)),
    "relu of bool": lambda x: F.relu(x > 0),
    "topk of bool": lambda x: (x > 0).topk(3),
    "convolution of two dtypes": lambda x: F.conv1d(x[None].half(), _like(x, 4, 3, 2), groups=1),
    "batch norm of two dtypes": lambda x: F.batch_norm(x.double(), _like(x, 4), _like(x, 4), _like(x, 4)),
    "arange of float8": lambda x: torch.arange(9, dtype=torch.float8_e4m3fn, device=x.device),
    "linspace of uint16": lambda x: torch.linspace(0, 1, 9, dtype=torch.uint32, device=x.device),
    "put in place": lambda x: x.put_(x[0], x[0]),
    "index_put in place": lambda x: x.index_put_((_ints(x, 0, 0),), _like(x, 3, 1)),
    "index_put rank": lambda x: x.index_put((_ints(x, 0, 0),), _like(x, 3, 2, 4)),
    "pow in place": lambda x: x.long().pow_(-1),
    "uniform": lambda x: x.uniform_(2, 1),
    "randint": lambda x: torch.randint(5, 2, (3,), device=x.device),
    "randperm": lambda x: torch.randperm(-1, device=x.device),
    "lstm": lambda x: torch.nn.LSTM(5, 2, device=x.device)(x[None]),
    "attention of vectors": lambda x: F.scaled_dot_product_attention(x[0], x[0], x[0]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], _like(x, 1, 2, 4)),
    "multi_head": lambda x: torch.nn.MultiheadAttention(4, 3, device=x.device),
    "solve": lambda x: torch.linalg.solve(x, x),
    "isin transposed": lambda x: torch.isin(x, x.t()),
    "put columns": lambda x: x.__setitem__((slice(None), torch.tensor([1, 0], device=x.device)), x),
    "put rows": lambda x: x.__setitem__(torch.tensor([1, 0], device=x.device), x),
    "inv": lambda x: torch.linalg.inv(x),
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "det": lambda x: torch.linalg.det(x),
    "fft": lambda x: torch.fft.fft(x, dim=4),
    "fft n": lambda x: torch.fft.fft(x, n=0),
}  # fmt: skip
VALUES_DECIDE = {"bool of many", "float of many", "numpy of a leaf"}  # reads, which may synchronise before they refuse


def _source(device: str) -> Tensor:
    return (torch.arange(12, dtype=torch.float32) / 7 - 0.5).reshape(3, 4).to(device)


def _error(call: Callable[[], Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return error
    return None


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z_]{3,}", text.split("Exception raised")[0].lower().replace("lazy", "cpu")))


def _check(have: Exception | None, want: Exception | None, how: str) -> None:
    assert want is not None, "eager takes the call"
    assert type(have) is type(want), f"{how}: {have!r}, eager: {want!r}"
    missing = _words(str(want)) - _words(str(have))
    assert len(missing) * 2 <= len(_words(str(want))), f"{how}: {str(have)!r} does not say {missing}; eager: {want!r}"


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call(name: str, operator_by_operator: None) -> None:
    call = CALLS[name]
    want = _error(lambda: call(_source("cpu") * 2))
    x = _source("lazy")
    _check(_error(lambda: call(x * 2)), want, "at first sight")
    torchlazy.sync()
    for _ in range(3):
        y = x * 2
        (y + 1).exp()
        torchlazy.sync()
    _check(_error(lambda: call(x * 2)), want, "in place of a call that is followed")
    torchlazy.sync()
    kept = x * 2
    _check(_error(lambda: call(kept + 0)), want, "again")
    assert torch.equal(kept.cpu(), _source("cpu") * 2)  # what was recorded before is as it was


@pytest.mark.parametrize("name", [name for name in CALLS if name not in VALUES_DECIDE])
def test_wrong_call_in_a_compiled_function(name: str, operator_by_operator: None) -> None:
    call = CALLS[name]
    want = _error(lambda: call(_source("cpu") * 2))
    compiled = torchlazy.compile(lambda x: call(x * 2))
    for how in ("compiled", "compiled, again"):
        _check(_error(lambda: compiled(_source("lazy"))), want, how)


def test_a_call_that_raises_each_time_is_captured_no_more_and_says_why():
    def call(x):
        raise ValueError("its own")

    run = torchlazy.compile(call)
    for _ in range(6):
        with pytest.raises(ValueError, match="its own"):
            run(torch.ones(3))
    assert run.report().captures == 3 and run.report().verified == 3
    assert "not captured: it raised ValueError" in run.report().reasons
