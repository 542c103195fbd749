"""Programs whose result follows something that changes between two calls, played plain and compiled.

Invariant: a case's last changes leave the process as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.lazy.kept_compiles import KeptCompiles

Changes = list[Callable[[], Any]]
Case = Callable[[str], tuple[Callable[[torch.Tensor], Any], Changes]]
CALLS = 3  # before each change


def _played(case: Case, device: str, compile: Callable[[Any], Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    function, changes = case(device)
    call = compile(function)
    x = torch.arange(16.0).view(4, 4).sub(7).to(device)
    for change in (lambda: None, *changes):
        change()
        for _ in range(CALLS):
            try:
                found = call(x)
            except (RuntimeError, TypeError) as error:
                found = str(error)
            yield tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, found)


def assert_each_change_is_noticed(case: Case, device: str) -> None:
    """Calls compiled without audits give what plain ones do, before and after each change, and some are replayed."""
    want = list(_played(case, "cpu", lambda function: function))
    assert len(set(map(str, want))) > 1, "nothing changed"
    compile = KeptCompiles()
    for number, (have, theirs) in enumerate(zip(_played(case, device, compile), want, strict=True)):
        if isinstance(theirs, str):
            assert have == theirs
        else:
            torch.testing.assert_close(have, theirs, check_device=False, msg=lambda text, n=number: f"call {n}: {text}")
    report = compile.first_report()
    assert report.replays >= 2, report


def setter(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute when it is called."""
    return lambda: setattr(owner, name, value)
