"""The errors of this package: each says what is wrong, where (operation, operands, user's line) and what to do.

Invariant: nothing here knows a graph; callers format the place they speak of with `place_of`.
"""

from __future__ import annotations

from torch import fx


class PrimsError(Exception):
    """Base of the errors of `torchlazy.prims`."""


class MetaError(PrimsError):
    """A primitive was given operands or attributes that it is not defined for.

    Cause: shapes or dtypes differ where they must be equal (primitives neither broadcast nor promote).
    Example: `add: shapes (2, 3) and (3,) differ`. Fix: `b.promote(x, y)` or `b.broadcast` before the primitive.
    """


class GraphError(PrimsError):
    """A graph is not legal in the dialect that it claims.

    Cause: a pass or decomposition built an illegal node. Fix: the remedy that the message ends with.
    """


class RuleError(PrimsError):
    """A decomposition rule returned something else than the ATen operator does (shape or dtype).

    Cause: a mistake in the rule, not in the user's program: the driver then calls the ATen operator as it is.
    """


class NotApplicable(PrimsError):
    """Raised inside a rule that cannot express this call (complex numbers, sparse layouts): the op becomes extern."""


class ExternByChoice(NotApplicable):
    """Raised inside a rule that leaves this call to ATen's kernel on purpose, as the better one: no rule is missing."""


def place_of(node: fx.Node) -> str:
    """`%add = add(float32[2, 3], float32[3])  # model.py:41`, for the middle line of a message."""

    def show(value: object) -> str:
        if isinstance(value, fx.Node):
            return f"%{value.name}: {value.meta.get('val', '?')}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(show, value))}]"
        return repr(value)

    target = getattr(node.target, "__name__", str(node.target))
    operands = [show(arg) for arg in node.args] + [f"{key}={show(value)}" for key, value in node.kwargs.items()]
    frame = node.meta.get("frame") or "line unknown"
    return f"%{node.name} = {target}({', '.join(operands)})  # {frame}"
