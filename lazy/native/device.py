"""The device "lazy" by the native recorder: tensors of the device that computes, which carry the recorder's key.

To torch's C++ and to everything here they are ordinary tensors; Python is told that they are on "lazy". Their operators
come to the native recorder from wherever they are called, which cuts at reads and after an optimizer's step.

Invariant: tensors that are made as `LazyTensor` stay that; which kind a factory makes is decided when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchlazy.lazy.config import config
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.torch_private.patches import teach_parse_to
from torchlazy.lazy.trace.geometry import check_lazy_index

_WITH_HOST_LENGTHS = (torch.ops.aten._pack_padded_sequence.default, torch.ops.aten._pad_packed_sequence.default)


class NativeDevice:
    """Makes lazy tensors, where `config.native_device` is on and the native recorder is there."""

    def __init__(self) -> None:
        self.target = ""  # the device that computes; "": no tensor was made yet
        self.count = 0  # of tensors that were made
        self._is_late = False
        self._recorder: Recorder | None = None

    def change_methods(self) -> None:
        """Called once, before anybody lists methods of tensors: those in Python that would not do for lazy ones. And a
        hook that cuts after an optimizer's step, which guards know from the start."""
        told = self._is_told_lazy
        ways = {
            "_reduce_ex_internal": (self._saved, told),
            "__deepcopy__": (self._copied, self.is_marked),
            "__dlpack_device__": (self._lent, told),
        }
        for name, (way, asks) in ways.items():
            setattr(torch.Tensor, name, _otherwise(getattr(torch.Tensor, name), way, asks))  # type: ignore[arg-type]
        register_optimizer_step_post_hook(lambda *_: BLOCKS.cut("optimizer step") if self.target else None)

    def install(self, recorder: Recorder) -> None:
        """Called once, with the one recorder."""
        self._recorder = recorder
        recorder.lazy_type = self.computes
        teach_parse_to(self._is_told_lazy)

    def is_on(self) -> bool:
        """Whether the next tensor on "lazy" is one of these. Where the library is still compiled as the first is made,
        none in this process is: the two kinds would meet."""
        recorder = self._recorder
        if config.native_device != "on" or recorder is None or self._is_late:
            return False
        if self.target and recorder.mode_depth:  # in a window or a capture, whatever settings it needs
            return True
        if not BLOCKS.serves(recorder.driver):
            return False
        if not self.target:
            if not BLOCKS.load(recorder, recorder.driver):
                self._is_late = True
                return False
            self.target = recorder.target
            BLOCKS.use_device(self.target)
            recorder.mark_result = self.mark_result
        return True

    def is_in_use(self) -> bool:
        """Whether there may be such tensors, and more of them."""
        return bool(self.target) and config.native_device == "on"

    def computes(self) -> str:
        """The type of the device that computes the next tensors on "lazy", where they are of this kind; else ""."""
        return self.target.partition(":")[0] if self.is_on() else ""

    def made(self, op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What a factory makes on "lazy"."""
        check_lazy_index(kwargs["device"])
        self.count += 1
        return BLOCKS.library.make(op, *args, **{**kwargs, "device": self.target})

    def mark(self, value: Any) -> None:
        """Tensors in what a compiled call gave (tuples, lists, dictionaries) are on "lazy"."""
        BLOCKS.library.mark_all(value)

    def mark_result(self, op: Any, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Of an operator that is recorded in Python (in a compiled call, a window): on "lazy" where it would be."""
        BLOCKS.library.mark_result(result[0] if op in _WITH_HOST_LENGTHS else result, args, kwargs)

    def loaded(self, host: torch.Tensor) -> torch.Tensor | None:
        """The tensor of a file or a pickle, where it need not be moved: what shared memory there shares it."""
        if self.computes() != "cpu" or host.device.type != "cpu":
            return None
        BLOCKS.library.mark(host, True)
        return host

    def _saved(self, method: Any, tensor: torch.Tensor, protocol: Any) -> Any:
        """As host memory and a device: such files load without torchlazy, too."""
        host = BLOCKS.library.unmarked(tensor).cpu()
        if host.is_inference():  # what a copy or a file makes of it is not
            host = torch.empty(0, dtype=host.dtype).set_(
                host.untyped_storage(), host.storage_offset(), host.shape, host.stride()
            )
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (host, tensor.dtype, "lazy", tensor.requires_grad)

    def _copied(self, method: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        """As torch copies tensors of the device that computes: with those that share their memory."""
        before, told = BLOCKS.library.pause(), BLOCKS.library.tell_target(True)
        try:
            found = method(tensor, memo)
        finally:
            BLOCKS.library.tell_target(told)
            BLOCKS.library.restore(before)
        BLOCKS.library.mark_all(found)
        return found

    def lent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the device that computes, on the same memory, to which others may write: from now on its
        operators run at once."""
        found: torch.Tensor = BLOCKS.library.lend(tensor)
        return found

    def unmarked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the device that computes, on the same memory, which is not written to elsewhere meanwhile."""
        if not self.is_marked(tensor):
            return tensor
        BLOCKS.cut("memory is read")
        found: torch.Tensor = BLOCKS.library.unmarked(tensor)
        return found

    def _lent(self, method: Any, tensor: torch.Tensor) -> Any:
        """Who asks for the device takes the memory."""
        return method(self.lent(tensor))

    def _is_told_lazy(self, tensor: torch.Tensor) -> bool:
        return bool(self.target) and bool(BLOCKS.library.is_told_lazy(tensor))

    def is_in(self, value: Any) -> bool:
        """Whether such a tensor is in tuples, lists and dictionaries."""
        return bool(self.target) and bool(BLOCKS.library.any_marked(value))

    def is_marked(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of these tensors."""
        return bool(self.target) and bool(BLOCKS.library.is_marked(tensor))


def _otherwise(method: Any, way: Callable[..., Any], asks: Callable[[torch.Tensor], bool]) -> Any:
    """The method, for tensors that `asks` holds for in another `way`."""

    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return way(method, self, *args, **kwargs) if asks(self) else method(self, *args, **kwargs)

    return call


DEVICE = NativeDevice()
DEVICE.change_methods()
