"""Operators of torch's own database and their sample inputs, chosen, bounded and copied to the lazy device.

Invariant: the samples of an operator and dtype are the same in every process and on every device: the generators are
seeded by the operator's name, and a lazy copy has the strides and the offset of the tensor that it copies.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.tensor import LAZY

# Operators that want an argument tensor on the CPU whatever the device of the first one, as they do for CUDA.
HOST_ARGUMENTS = frozenset({"tensor_split"})
MAX_ELEMENTS = 200_000  # of all tensors of a sample together: larger ones test the memory, not the rules


def name_of(op: OpInfo) -> str:
    """ "add", "linalg.norm", "nn.functional.conv2d"; a variant follows after a dot."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def database() -> dict[str, OpInfo]:
    """Every entry by name, in the database's order."""
    return {name_of(op): op for op in op_db}


def supports(op: OpInfo, dtype: torch.dtype, *, gradient: bool = False, device: str = "cpu") -> bool:
    """Whether torch says that the operator takes this dtype on "cpu" or "cuda" (and has a gradient for it)."""
    if gradient:
        return op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    return dtype in op.supported_dtypes(device)


def seed(name: str, number: int = 0) -> None:
    """Seed torch's generator for one sample of one operator."""
    torch.manual_seed((zlib.crc32(name.encode()) + number) & 0x7FFFFFFF)


def samples_of(op: OpInfo, dtype: torch.dtype, *, gradient: bool, limit: int) -> list[SampleInput]:
    """At most `limit` samples (0: all of them), spread evenly over those that the database yields."""
    name = name_of(op)
    seed(name)
    with _seeds_of_the_host():
        made = [s for s in op.sample_inputs("cpu", dtype, requires_grad=gradient) if _elements(s) <= MAX_ELEMENTS]
    if limit and len(made) > limit:
        made = [made[i * (len(made) - 1) // (limit - 1)] for i in range(limit)] if limit > 1 else made[:1]
    return made


@contextlib.contextmanager
def _seeds_of_the_host() -> Iterator[None]:
    """The database seeds before each sample; torch then notes the call's stack for each kind of device, which is most
    of the time that 1,440 samples take. They are made on the CPU: its generator is the one that counts."""
    seed_everything = torch.manual_seed
    torch.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.manual_seed = seed_everything


def _elements(sample: SampleInput) -> int:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


class Call:
    """One sample as something to call: function, arguments, and the leaves that ask for a gradient."""

    def __init__(self, op: OpInfo, sample: SampleInput, place: Callable[[Any], Any]) -> None:
        tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
        flat, spec = pytree.tree_flatten(tree)
        known: dict[int, Any] = {}
        placed = [known.setdefault(id(x), self._place(op, x, place, i)) for i, x in enumerate(flat)]
        self.input, self.args, self.kwargs = pytree.tree_unflatten(placed, spec)
        self.leaves = [x for x in known.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        self.function = op
        self.process = sample.output_process_fn_grad

    @staticmethod
    def _place(op: OpInfo, value: Any, place: Callable[[Any], Any], position: int) -> Any:
        return on_cpu(value) if position and op.name in HOST_ARGUMENTS else place(value)

    def __call__(self) -> Any:
        """What the operator returns."""
        return self.function(self.input, *self.args, **self.kwargs)


def on_cpu(value: Any) -> Any:
    """A copy of a tensor with its strides: operators that write to their arguments leave the sample as it was."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return _twin(value).requires_grad_(value.requires_grad)


def on_gpu(value: Any) -> Any:
    """The same on the GPU; `device=` arguments say so too."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device("cuda")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return on_cpu(value).cuda() if isinstance(value, torch.Tensor) else value
    return _twin(value, "cuda").requires_grad_(value.requires_grad)


def on_lazy(value: Any) -> Any:
    """The same on the lazy device; `device=` arguments say lazy too."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return LAZY
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    if value.layout is not torch.strided:
        return on_cpu(value)
    return recorder.new_real_tensor(_twin(value, recorder.target), LAZY).requires_grad_(value.requires_grad)


def widened(value: Any) -> Any:
    """The same in double precision on the CPU: what an exact result is computed from."""
    if isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex):
        wide = torch.complex128 if value.dtype.is_complex else torch.float64
        return value.detach().to(wide).requires_grad_(value.requires_grad)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return on_cpu(value)


def _twin(value: torch.Tensor, device: str | None = None) -> torch.Tensor:
    device = device or str(value.device)  # an error input may lie on the meta device
    plain = value.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg().clone().to(device)
    count = plain.untyped_storage().nbytes() // max(plain.element_size(), 1)
    memory = plain.as_strided((count,), (1,), 0).clone().to(device)
    return memory.as_strided(plain.shape, plain.stride(), plain.storage_offset())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, in order."""
    return (x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
