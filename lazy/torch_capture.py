"""Code that `torch.compile`'s capture must leave alone: torch's own calls into the recorder, and compiled callables.

While a function that torch captured runs, torch looks at every Python function that is called, also at one that C code
calls for an operator on a lazy tensor: it would capture the recorder, whose state changes at each call, and fail.

Invariant: from the functions named here on, nothing is captured; operators on lazy tensors are recorded as ever, and
what torch captured of the function around them runs without them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch


def _find_strategy() -> Callable[[CodeType], None]:
    """What tells torch to run a function, and all that it calls, as they are.

    Why private: the public way (`torch.compiler.disable`) wraps the function in Python, at a microsecond for each
    operator, and imports torch's compiler. This sets a mark on the code object, which costs calls nothing.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is None:
        return lambda code: None
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    return lambda code: mark(code, strategy)


_mark = _find_strategy()


def leave_alone(*functions: Any) -> None:
    """Let torch's capture run these functions, and what they call, as they are. Methods and code objects too."""
    for function in functions:
        code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            raise TypeError(f"leave_alone: {function!r} has no Python code")
        _mark(code)


def leave_inner_alone(maker: FunctionType) -> None:
    """`leave_alone` of the functions that `maker` makes when it is called."""
    leave_alone(*(constant for constant in maker.__code__.co_consts if isinstance(constant, CodeType)))
