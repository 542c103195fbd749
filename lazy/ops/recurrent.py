"""`lstm` on the lazy device stays one library call a layer and direction, forward and backward.

For a device that torch does not know it would use its composite form: some ten recorded operators a time step, and a
trace of its own for each length. On a CPU eager calls oneDNN's kernel once a layer; so does what is recorded here.

Invariant: the arguments of each call are those that eager passes. Where eager takes its composite form (float64,
projections, nothing in it, oneDNN switched off, halves that this CPU's oneDNN lacks), so does this; so does another
target than the CPU, and autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.op_schema import OpPlan

aten = torch.ops.aten
_LSTM = aten.lstm.input
_MODE = 2  # of the operator: an LSTM
_KEEP: list[torch.library.Library] = []


def lstm(
    recorder: Recorder,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of x (time, batch, features), or (batch, time, features), the outputs and the last hidden and cell states."""
    if x.size(1 if batch_first else 0) == 0:  # torch's composite form would say that it has nothing to join
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    directions = 2 if is_bidirectional else 1
    each = 4 if has_biases else 2  # with projections a layer has one more
    is_whole = len(states) == 2 and len(weights) == each * layers * directions
    if not (is_whole and _is_for_library(recorder, (x, *states, *weights))):
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _LSTM.decompose(
            x, states, weights, has_biases, layers, dropout, is_training, is_bidirectional, batch_first
        )
        return found
    hidden, cell = states
    width = hidden.size(2)
    outputs = x.transpose(0, 1) if batch_first else x
    hiddens, cells = [], []
    for layer in range(layers):
        outputs, made = outputs.contiguous(), []
        for direction in range(directions):
            at = layer * directions + direction
            of_layer = list(weights[each * at : each * (at + 1)])
            if not has_biases:
                of_layer += [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in of_layer]
            output, last_hidden, last_cell, _ = aten.mkldnn_rnn_layer.default(
                outputs, *of_layer, hidden[at], cell[at], direction > 0, [], _MODE, width, layers, has_biases,
                is_bidirectional, batch_first, is_training,
            )  # fmt: skip
            made.append(output)
            hiddens.append(last_hidden)
            cells.append(last_cell)
        outputs = torch.cat(made, -1) if is_bidirectional else made[0]
        if dropout and is_training and layer < layers - 1:
            outputs = torch.dropout(outputs, dropout, True)
    return outputs.transpose(0, 1) if batch_first else outputs, torch.stack(hiddens), torch.stack(cells)


def _is_for_library(recorder: Recorder, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether eager, on the device that computes, would call oneDNN's kernel."""
    return (
        recorder.target == "cpu"
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("lazy")
        and tensors[0].numel() > 0
        and all(isinstance(t, LazyTensor) and t._geometry.device == LAZY for t in tensors)
        and _has_kernel(tensors[0].dtype)
        and all(t.dtype == tensors[0].dtype for t in tensors)
    )


def _has_kernel(dtype: torch.dtype) -> bool:
    """Whether eager takes oneDNN's kernel for this dtype: that of float16 computes no gradients."""
    return dtype in _kernels() and not (dtype == torch.float16 and torch.is_grad_enabled())


@functools.cache
def _kernels() -> frozenset[torch.dtype]:
    """The dtypes for which oneDNN has a kernel on this CPU."""
    with below_autograd():  # a mode of the user's sees no question
        halves = {
            torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        }
    return frozenset((torch.float32, *(dtype for dtype, is_there in halves.items() if is_there)))


def install(recorder: Recorder) -> None:
    """A kernel above autograd for the lazy device, and, for inference mode, one in the recorder's table."""

    def above_autograd(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return lstm(recorder, *args)

    def handler(rec: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return lstm(rec, *args) if _is_for_library(rec, (args[0], *args[1], *args[2])) else NotImplemented

    recorder.handlers[_LSTM] = handler

    library = torch.library.Library("aten", "IMPL")
    library.impl("lstm.input", above_autograd, "AutogradLazy")
    _KEEP.append(library)
