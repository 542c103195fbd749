"""What torch calls for an operator on a lazy tensor, up to the end of the process and at it.

Once Python takes its modules apart, objects that die may still compute (`__del__`), with names that are gone. Operators
and reads raise then, which Python prints and goes on; half done, they would end the process from C++.

Invariant: functions of `atexit` compute as ever; the look for the end costs nothing before they run.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.record.tensor import LazyTensor

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder

_DETACH = torch.ops.aten.detach.default
Rule = Callable[[Any, type], Any]


def rules_up_to_the_end(recorder: Recorder, asked: Rule) -> Rule:
    """On our tensors the recorder's functions, on others what `asked` says."""
    ours: Any = LazyTensor

    def rule(op: torch._ops.OpOverload, kind: type) -> Any:
        if kind is not ours:
            return asked(op, kind)
        return recorder.detach if op is _DETACH else recorder.general

    # What these need is bound here: names of a module are gone by then.
    def refuse(is_ending: Callable[[], bool] = sys.is_finalizing, error: type[Exception] = RuntimeError) -> None:
        if is_ending():
            raise error("torchlazy: the process ends: lazy tensors compute and are read no more")

    def while_ending(cls: Any, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        refuse()
        return recorder.general(cls, op, types, args, kwargs)

    def without_class(op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return while_ending(None, op, types, args, kwargs)

    @atexit.register
    def look_for_the_end() -> None:
        nonlocal ours, asked
        before, lazy, real, ours = asked, ours, recorder.real, None
        asked = lambda op, kind: while_ending if kind is lazy else before(op, kind)  # noqa: E731

        def read(tensor: Any, cause: str) -> torch.Tensor:
            refuse()
            return real(tensor, cause)

        recorder.real = read  # type: ignore[method-assign]
        LazyTensor.__torch_dispatch__ = without_class  # type: ignore[method-assign, assignment]

    return rule
