"""Which storages of a list somebody else holds, too: told by CPython's counts of references."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchlazy.lazy.storage import LazyStorage


def held_elsewhere(storages: Sequence[LazyStorage]) -> list[LazyStorage]:
    """Those that somebody holds beside the list."""
    return [storage for storage in storages if sys.getrefcount(storage) > _IN_LIST_ONLY]


_IN_LIST_ONLY = 0
while held_elsewhere([LazyStorage()]):  # what Python itself holds meanwhile differs from version to version
    _IN_LIST_ONLY += 1
