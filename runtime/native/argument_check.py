"""Whether the arguments of a call are like those of another call, in one native check.

Read and compared in Python, the facts of one recorded tensor take two microseconds, and many times that where the
caches hold other things.

Invariant: arguments that fit have the facts that those had with which the look was made; they are no tensors of which
`memories` knows, and no two are on one memory.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torchlazy.runtime.native.identity_check import TensorReaders, native_fit
from torchlazy.runtime.native.object_layout import word_at

_SAME, _OF_CLASS, _RECORDED, _OF_BITS = range(4)
_PLAIN = frozenset({int, bool, str, bytes, type(None)})
_MOST = 16  # tensors
_OWN_NAMES = 5

Look = Callable[[tuple[Any, ...]], bool]


def argument_check(
    readers: TensorReaders | None,
    given: Sequence[Any],
    free: Collection[int],
    kind: Any,
    memories: dict[int, int],
) -> Look | None:
    """A function in C over the tuple of arguments; None where there are some that it cannot tell.

    `free` are positions of numbers whose values do not matter, `kind` the class of recorded tensors, `memories` numbers
    those of the state by their addresses.
    """
    if readers is None or readers.counter < 0:
        return None
    rows, names, met, no_gradient = array("q"), [0] * _OWN_NAMES, set[int](), 0
    kept: list[Any] = [memories]
    for position, value in enumerate(given):
        if type(value) is kind:
            own = tuple(vars(value))
            if own[:2] != ("_storage_", "_geometry") or len(own) != _OWN_NAMES:
                return None
            storage, form = value._storage_, value._geometry
            if id(storage) in met or (met and names != list(map(id, own))):
                return None
            if (value.is_leaf or value.retains_grad) and value.grad is not None:
                return None
            names, no_gradient = list(map(id, own)), readers.gradient_of(value)
            met.add(id(storage))
            kept += (own, form, storage.base)
            rows.extend((_RECORDED, id(form), id(storage.base)))
        elif position in free:
            rows.extend((_OF_CLASS, id(type(value)), 0))
        elif type(value) is float and word_at(id(value) + 16) == _bits(value):
            rows.extend((_OF_BITS, _bits(value), id(float)))
        elif type(value) in _PLAIN:
            kept.append(value)
            rows.extend((_SAME, id(value), id(type(value))))
        else:
            return None
    if len(met) > _MOST:
        return None
    header = array("q", (len(given), id(kind), *names, id(_BASE), id(memories), no_gradient))
    look: Look = native_fit(readers, header + rows, (kept, kind))
    return look if look(tuple(given)) else None


def _bits(value: float) -> int:
    found: int = struct.unpack("q", struct.pack("d", value))[0]
    return found


_BASE = "base"
