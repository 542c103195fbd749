"""Users' tensor classes over lazy tensors: `lazy.as_subclass(Image)`, and `__torch_function__` of their results.

Invariant: such a tensor is a `LazyTensor` to the recorder and one of the user's class to all other code; its class
derives from both, and is made once for each of the user's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions
from torchlazy.lazy.record.tensor import OWN_ATTRIBUTES, LazyTensor, note_change
from torchlazy.lazy.torch_private.dispatch import without_torch_function
from torchlazy.lazy.torch_private.patches import make_subclasses

_CLASSES: dict[type, type] = {}
on_new_class: list[Callable[[type], None]] = []  # called with each class that is made


def with_own_rules(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The first tensor with a `__torch_dispatch__` of its own that is not lazy, such as a jagged nested tensor."""
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(
            tensor, LazyTensor
        ):
            return tensor
    return None


class _OfUsers(LazyTensor):
    """What users' classes inherit from torch.Tensor, and LazyTensor turns off: results are of the class again."""

    # Defined here: torch turns its default off in classes with a `__torch_dispatch__`.
    @classmethod
    def __torch_function__(  # type: ignore[override]  # the stub of the disabled one lacks `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not all(issubclass(cls, kind) or issubclass(kind, LazyTensor) for kind in types):
            return NotImplemented
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
            return result if func in get_default_nowrap_functions() else _converted(result, cls)

    def _on_same_memory(self) -> LazyTensor:
        with without_torch_function():
            return as_subclass(super()._on_same_memory(), type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_torch_function():
            make, given, *_ = super().__reduce_ex__(protocol)
        state = {name: value for name, value in self.__dict__.items() if name not in OWN_ATTRIBUTES}
        return torch._tensor._rebuild_from_type_v2, (make, users_class(type(self)), given, state)


def _converted(value: Any, kind: type) -> Any:
    """Lazy tensors in `value` as ones of the class; ordinary ones (results on the host) as ones of the user's class."""
    if isinstance(value, LazyTensor):
        return value if isinstance(value, kind) else as_subclass(value, kind)
    if isinstance(value, torch.Tensor):
        wanted = users_class(kind)
        return value if isinstance(value, wanted) else value.as_subclass(wanted)
    if isinstance(value, (tuple, list)):
        found = [_converted(item, kind) for item in value]
        return type(value)(found)  # torch's named tuples are made from a sequence
    return value


def lazy_class(wanted: type) -> type:
    """The class of lazy tensors that are of the user's class `wanted`."""
    if wanted is torch.Tensor or issubclass(wanted, LazyTensor):
        return wanted
    found = _CLASSES.get(wanted)
    if found is None:
        names = {"__module__": wanted.__module__, "__qualname__": wanted.__qualname__, "__doc__": wanted.__doc__}
        found = _CLASSES[wanted] = type(wanted.__name__, (wanted, _OfUsers), names)
        for tell in on_new_class:
            tell(found)
    return found


def users_class(kind: type) -> Any:
    """The user's class that a class of lazy tensors stands for."""
    return next((one for one, made in _CLASSES.items() if made is kind), torch.Tensor)


def _as(tensor: LazyTensor, wanted: type) -> Any:
    """`tensor`, a new object, turned into one of the class `wanted`."""
    if not issubclass(wanted, torch.Tensor):
        raise TypeError(f"as_subclass: {wanted.__name__} is no class of tensors; derive it from torch.Tensor")
    recorder = tensor.recorder
    if recorder.capture is not None:
        recorder.capture.refuse(f"it makes tensors of the class {wanted.__name__}")
    note_change(tensor)
    if wanted is not torch.Tensor:
        tensor.__class__ = lazy_class(wanted)
    return tensor


def as_subclass(self: LazyTensor, cls: type) -> Any:
    """An alias of this tensor, of the class `cls`; its gradients flow."""
    with without_torch_function():
        alias = torch.ops.aten.alias.default(self)
    return _as(alias, cls) if isinstance(alias, LazyTensor) else alias.as_subclass(cls)


def _turned(made: torch.Tensor, wanted: type) -> Any:
    """A new tensor as one of the class `wanted`, which may stand for one of the user's."""
    with without_torch_function():
        if not isinstance(made, LazyTensor) and issubclass(wanted, LazyTensor):
            wanted = users_class(wanted)
        return made.as_subclass(wanted)


def install() -> None:
    """Let lazy tensors be turned into users' classes."""
    LazyTensor.as_subclass = as_subclass  # type: ignore[method-assign, assignment]

    def is_recording() -> bool:
        recorder = LazyTensor.recorder
        return bool(recorder.mode_depth) or recorder.capture is not None

    make_subclasses(lambda value: isinstance(value, LazyTensor), is_recording, _turned)
