"""Functions of torch that C++ composes of operators, which take a number that the captured call follows.

C++ gets the plain value, and what it computes of it goes unseen into several operators. Here the function is composed
the same way in Python, or (`NUMBER_ONCE`) it is known to hand the number on once, as it is.

Invariant: the operators, and their order, are those of torch's own function; a power by a float is one by a tensor that
holds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torchlazy.lazy.traced_numbers import node_of

# The number goes to one operator, as it is, but not to the first.
NUMBER_ONCE = frozenset(
    {F.rms_norm, torch.rms_norm, F.margin_ranking_loss, torch.margin_ranking_loss, F.hinge_embedding_loss,
     torch.hinge_embedding_loss, F.cosine_embedding_loss, torch.cosine_embedding_loss}
)  # fmt: skip


def composed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The function's value, where a number of it is followed; else NotImplemented."""
    compose = _COMPOSED.get(func)
    if compose is None or not any(node_of(value) is not None for value in (*args, *kwargs.values())):
        return NotImplemented
    named = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not named.keys() <= inspect.signature(compose).parameters.keys():  # `out=`
        return NotImplemented
    return compose(*args, **named)


def _dropout(input: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Ordinary tensors on the CPU: input * mask / (1 - p), the mask drawn by `bernoulli_`."""
    if input.device.type != "cpu" or inplace or not training or not 0 < p < 1 or input.numel() == 0:
        return NotImplemented
    noise = torch.ops.aten.empty_like.default(input).bernoulli_(1 - p)
    torch.ops.aten.div_.Scalar(noise, 1 - p)  # the overloads of C++: a trace of before is a sample of this one
    return input * noise


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Any:
    """Smoothed labels given as classes: (1 - smoothing) * nll + smoothing / classes * the sum of all."""
    classes = input.shape[input.dim() - 1 if input.dim() == 1 else 1]
    plain = target.dtype is torch.int64 and weight is None and size_average is None and reduce is None
    if not plain or reduction != "mean" or not 0 < label_smoothing < 1 or input.dim() == 1:
        return NotImplemented
    logs = torch.log_softmax(input, 1)
    likelihood = F.nll_loss(logs, target, ignore_index=ignore_index)
    everything = -logs.sum(1)
    ignored = target == ignore_index
    everything = everything.masked_fill_(ignored, 0.0)
    smooth = everything.sum() / (ignored.numel() - ignored.sum())
    return (1 - label_smoothing) * likelihood + smooth * (label_smoothing / classes)


def _power(input: Any, exponent: Any) -> Any:
    """An exponent, or a base, that is a float: as a tensor of one number. An operator that takes the number itself
    chooses its code by it, and so does its backward."""
    tensor, number = (input, exponent) if isinstance(input, torch.Tensor) else (exponent, input)
    if isinstance(number, torch.Tensor) or not isinstance(number, float) or tensor.dtype not in _EXACT:
        return NotImplemented
    dtype = torch.float64 if tensor.dim() else tensor.dtype
    made = torch.full((), number, dtype=dtype, device=tensor.device)
    return torch.pow(tensor, made) if tensor is input else torch.pow(made, tensor)


_OTHER_NAMES = {"self": "input", "train": "training"}  # of torch.pow, torch.dropout
_EXACT = (torch.float32, torch.float64)
_COMPOSED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout, torch.dropout: _dropout, F.cross_entropy: _cross_entropy,
    torch.pow: _power, torch.Tensor.pow: _power, torch.Tensor.__pow__: _power,
    torch.Tensor.__rpow__: lambda exponent, input: _power(input, exponent),
}  # fmt: skip

__all__ = ["NUMBER_ONCE", "composed"]
