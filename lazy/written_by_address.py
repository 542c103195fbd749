"""Ordinary tensors that C++ makes empty in a captured call and fills by their address, as `at::tensor(lengths)` does.

Invariant: what no operator wrote before the first one that reads it was written unseen, or by nobody: each replay puts
into its memory what it held then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.call_template import HostCall, HostKept, HostMade
from torchlazy.lazy.torch_private import below_autograd

if TYPE_CHECKING:
    from torchlazy.lazy.capture import Capture

aten = torch.ops.aten
_EMPTY = frozenset({
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip
_OVERWRITING = frozenset(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "uniform", "normal", "random", "bernoulli", "exponential")
)
_MOST = 4096  # elements: C++ fills what it got as a list of numbers


class Blanks:
    """The ordinary tensors of one captured call that no operator wrote or read yet, by their memory."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._known: dict[int, torch.Tensor] = {}

    def made(self, op: Any, tensors: Sequence[torch.Tensor]) -> None:
        """`op` gave these."""
        if op in _EMPTY:
            small = [tensor for tensor in tensors if type(tensor) is torch.Tensor and 0 < tensor.numel() <= _MOST]
            self._known.update((tensor.untyped_storage()._cdata, tensor) for tensor in small)

    def taken(self, op: Any, args: Sequence[Any]) -> None:
        """An operator takes the arguments. Views read nothing yet; what is overwritten as a whole held nothing."""
        if not self._known or self._capture.recorder.plan(op).kind == "view":
            return
        for position, value in enumerate(args):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if type(item) is torch.Tensor and item.layout is torch.strided:
                    blank = self._known.pop(item.untyped_storage()._cdata, None)
                    is_whole = item is blank and not position and op._schema.name in _OVERWRITING
                    if blank is not None and not is_whole:
                        self._fill(blank)

    def _fill(self, tensor: torch.Tensor) -> None:
        host = self._capture.host_read(tensor)
        self._capture.steps.append(
            HostCall(aten.copy_.default, (host, _constant(self._capture, tensor)), (), (None,), (host,))
        )

    def let_go(self) -> None:
        self._known.clear()


def made_anew(capture: Capture, tensor: torch.Tensor) -> None:
    """Each replay makes the tensor anew, with what it holds now."""
    capture.steps.append(HostCall(aten.clone.default, (_constant(capture, tensor),), (), (capture.hosts,), ()))
    capture.know(tensor, HostMade(capture.hosts))
    capture.hosts += 1


def _constant(capture: Capture, tensor: torch.Tensor) -> HostKept:
    with below_autograd():
        constant = tensor.clone()
    kept = HostKept(constant, constant=True)
    capture.know(constant, kept)
    return kept
