"""Queries to C++ with plain words as answers, such as settings of torch, called natively.

This skips Python's function around them, whose code and whose result's object would have to come from memory, too.

Invariant: a question changes nothing, raises nothing, and may be asked in any thread.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

VALUE, BYTE_OF, WORDS_ALIKE, BYTE = range(4)


@dataclass(frozen=True)
class PlainQuestion:
    """How it is asked. `form` says what `address` is:

    VALUE: a function's that takes a word and gives one; `mask` are the bits that count.
    BYTE_OF: a function's that gives an address, from which the byte at `place` counts, as far as `mask` says.
    WORDS_ALIKE: the same, but whether the words at `place` and at `other` are equal.
    BYTE: a byte's own.
    """

    form: int
    address: int
    argument: int = 0
    place: int = 0
    mask: int = -1
    other: int = 0

    def now(self) -> int:
        """The answer, as native code gets it (runtime/native/identity_check.cpp)."""
        if self.form == BYTE:
            return ctypes.c_ubyte.from_address(self.address).value & self.mask
        given: int = _function(self.address)(self.argument)
        if self.form == VALUE:
            return given & self.mask
        if self.form == BYTE_OF:
            return ctypes.c_ubyte.from_address(given + self.place).value & self.mask
        words = [ctypes.c_int64.from_address(given + place).value for place in (self.place, self.other)]
        return int(words[0] == words[1])

    def row(self) -> tuple[int, ...]:
        """The question and the answer of now in words of 64 bits."""
        return self.form, self.address, self.argument, self.place, self.mask, self.other, self.now()


def _function(address: int) -> Any:
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)
