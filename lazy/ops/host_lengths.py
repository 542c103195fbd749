"""Operators whose lengths are on the host on every device: packed sequences, splits at a tensor, the CTC loss, sparse
tensors whose size follows from their indices.

Invariant: as for CUDA tensors, batch sizes of a packed sequence are an ordinary CPU tensor, and lengths given as a
tensor are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.trace.op_schema import OpPlan

aten = torch.ops.aten
_KEEP: list[torch.library.Library] = []


def pack_padded_sequence(recorder: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(rows of the packed sequence, batch sizes): the sizes on the host, where the recurrent layers read them."""
    rows, sizes = recorder.run_eagerly(plan.op, args, kwargs, "its result's shape depends on the lengths")
    if isinstance(sizes, LazyTensor):
        sizes = recorder.real(sizes, "pack_padded_sequence").cpu()
    return rows, sizes


def _listed(lengths: torch.Tensor) -> Any:
    """The tensor's numbers. An ordinary tensor is read below the modes, so a cut and a capture are notified here."""
    recorder = LazyTensor.recorder
    capture = recorder.capture
    if not isinstance(lengths, LazyTensor) and recorder.mode_depth and recorder.is_in_trace(lengths):
        recorder.cut("tolist")  # a write to it may be pending
    if capture is not None and not isinstance(lengths, LazyTensor):
        found = capture.lengths.numbers(lengths)
        if found is not None:
            return found
        capture.read_on_host("tolist")
    return lengths.tolist()


def pad_packed_sequence(
    function: Any,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(padded rows, lengths) like `function`, which would write the lengths by their address.

    `data` (rows, ...), `batch_sizes` (steps,) int64; a `total_length` of 0 or less is that of the longest sequence.
    torch.nn checked the arguments.
    """
    sizes = _listed(batch_sizes)
    steps = len(sizes)
    padded = data.new_full((max(steps, total_length), sizes[0], *data.shape[1:]), padding_value)
    row = step = 0
    for size, equal in itertools.groupby(sizes):
        count = len(list(equal))
        rows = data[row : row + count * size].view(count, size, *data.shape[1:])
        padded[step : step + count, :size] = rows
        row, step = row + count * size, step + count
    lengths = [sum(size > sequence for size in sizes) for sequence in range(sizes[0])]
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The loss with lengths as numbers: torch reads them so on every device, except for tensor subclasses. Lengths that
    are computed on the CPU, as the scores are, stay tensors: the operator reads them itself.

    Torch's own reduction writes the lengths into a new tensor's memory, which does not exist while recording.
    """
    batched = log_probs.dim() == 3
    rows = log_probs if batched else log_probs.unsqueeze(1)
    if all(_is_computed(n, rows) for n in (input_lengths, target_lengths)):
        given = (rows, targets.to(rows.device), input_lengths, target_lengths)
        losses = aten._ctc_loss.Tensor(*given, blank, zero_infinity)[0]
        symbols: Any = target_lengths.clamp(min=1).to(losses.dtype)  # type: ignore[union-attr]
    else:
        lengths = [
            _listed(n.reshape(-1)) if isinstance(n, torch.Tensor) else list(n) for n in (input_lengths, target_lengths)
        ]
        losses = aten._ctc_loss.default(rows, targets.to(rows.device), *lengths, blank, zero_infinity)[0]
        symbols = [max(n, 1) for n in lengths[1]]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == 1:
        if isinstance(symbols, list):
            symbols = torch.tensor(symbols, dtype=losses.dtype, device=losses.device)
        return (losses / symbols).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _is_computed(lengths: Any, rows: torch.Tensor) -> bool:
    """Whether the lengths are a tensor on the lazy device like the scores, and computed on the CPU."""
    if not isinstance(lengths, LazyTensor) or not isinstance(rows, LazyTensor) or lengths.dim() != 1:
        return False
    return lengths.device == rows.device and rows._geometry.compute == "cpu"


def _ctc_loss_function(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return ctc_loss(*args, **kwargs)


def _functional_ctc_loss(
    function: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """torch.nn's form of it, which names the reduction; for an unknown one torch raises its error."""
    number = {"none": 0, "mean": 1, "sum": 2}.get(reduction)
    if number is None:
        return function(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, number, zero_infinity)


def tensor_split(function: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`function`, with sections or indices that are a tensor as numbers."""
    named = {name: _listed(value) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    return function(input, *(_listed(a) if isinstance(a, torch.Tensor) else a for a in args), **named)


def sparse_coo_tensor(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`function`, told the size that its indices need where the caller leaves that to it; asked to check its indices,
    they are checked here. It would look for both in memory."""
    named = dict(zip(("indices", "values", "size"), args, strict=False)) | kwargs
    indices, values, size = (named.get(name) for name in ("indices", "values", "size"))
    checks = named.get("check_invariants")
    if checks is None:
        checks = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    if values is None or ("size" in named and (size is None or not checks)):
        return function(*args, **kwargs)
    on = None if isinstance(indices, torch.Tensor) else torch.device("cpu")
    rows = torch.as_tensor(indices, device=on).detach().to(torch.int64)
    values = torch.as_tensor(values, device=on)
    if rows.dim() != 2:
        return function(*args, **kwargs)  # which refuses them
    if size is None:
        size = _size_of_sparse(rows, values)
    if checks:
        numbers = _listed(rows.reshape(-1))
        with LazyTensor.recorder.apart():
            there = torch.tensor(numbers, dtype=torch.int64).reshape(tuple(rows.shape))
            filled = torch.empty(tuple(values.shape) or (rows.shape[1],))
            aten._validate_sparse_coo_tensor_args.default(there, filled, size, named.get("is_coalesced"))
    return function(**(named | {"indices": rows, "size": size, "check_invariants": False}))


def _size_of_sparse(rows: torch.Tensor, values: torch.Tensor) -> list[int]:
    """One more than the largest index of each sparse dimension, and the dense dimensions of the values."""
    sparse = [0] * rows.shape[0]
    if rows.numel():
        for axis, lowest in enumerate(_listed(rows.amin(1))):
            if lowest < 0:
                raise RuntimeError(f"found negative index {lowest} for dim {axis}")
        sparse = [highest + 1 for highest in _listed(rows.amax(1))]
    return [*sparse, *values.shape[1:]]


def lengths_beside(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call of one of `CTC_LOSSES`, with the lengths on the GPU of its scores.

    Under any dispatch mode torch passes length tensors on as they are, to a kernel that requires them there.
    """
    scores = args[0] if args else kwargs.get("log_probs")
    if not isinstance(scores, torch.Tensor) or not scores.is_cuda:
        return args, kwargs

    def moved(value: Any) -> Any:
        return value.to(scores.device) if isinstance(value, torch.Tensor) else value

    names = ("input_lengths", "target_lengths")
    return (*args[:2], *map(moved, args[2:])), {n: moved(v) if n in names else v for n, v in kwargs.items()}


CTC_LOSSES = (torch.ctc_loss, F.ctc_loss)
UNPACK = torch._VF._pad_packed_sequence  # type: ignore[attr-defined]
# Functions that read a tensor's memory between their operators, or under a mode leave the lengths where they are.
BY_ADDRESS: dict[Any, Callable[..., Any]] = {
    UNPACK: pad_packed_sequence,
    torch.ctc_loss: _ctc_loss_function,
    F.ctc_loss: _functional_ctc_loss,
    torch.tensor_split: tensor_split,
    torch.Tensor.tensor_split: tensor_split,
    torch.sparse_coo_tensor: sparse_coo_tensor,
}


def install(recorder: Recorder) -> None:
    """Put these operators into the recorder's table, and the CTC loss above autograd."""

    def recorded(rec: Recorder, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return ctc_loss(*args, **kwargs)

    recorder.handlers[aten._pack_padded_sequence.default] = pack_padded_sequence
    recorder.handlers[aten.ctc_loss.Tensor] = recorded
    library = torch.library.Library("aten", "IMPL")
    library.impl("ctc_loss.Tensor", ctc_loss, "AutogradLazy")
    _KEEP.append(library)
