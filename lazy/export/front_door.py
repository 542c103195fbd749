"""`torchlazy.export` and `torchlazy.load` as users call them; what implements them is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.record.tensor import LazyTensor

if TYPE_CHECKING:
    from torchlazy.runtime.exported.run import Exported

_export: Any = DeferredModule("torchlazy.lazy.export.export")
_run: Any = DeferredModule("torchlazy.runtime.exported.run")


class ExportError(RuntimeError):
    """A program that is no one whole graph.

    Cause: it reads a value on the host (`.item()`, `if tensor:`, a printed loss), has a shape that depends on data,
    writes to a tensor that is neither an argument nor module state, or takes another path at another size.
    Fix: the line that the message names; `torchlazy.compile` and the lazy device run such programs as they are.
    """


def export(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
    dialect: str = "aten",
) -> Exported:
    """One whole graph of `fn(*args, **kwargs)`, a function, method or module, with its state, sizes and guards.

    `dynamic` names dimensions that vary, by argument and axis: `{"x": {0: "batch", 1: "2*n"}}`, with names, linear
    forms of one name, or `torch.export.Dim`. The program is recorded at a few sizes and never run; how each number
    moves with the sizes is found from these recordings, and checked against each of them. `dialect` is "aten" (torch's
    functional operators) or "prims" (the closed set of primitives).

    The result is called as `fn` is: it checks what it was exported for, computes without gradients, and updates its own
    copy of the buffers (`.state`). `.save(path)` writes it to one file that `torchlazy.load` reads without pickle.

    Raises ExportError where the program is no whole graph, with the user's line: it reads a value on the host, has a
    shape that depends on data, keeps a result in an attribute, or takes another path at another size.
    """
    exported: Exported = _export.export(LazyTensor.recorder, fn, args, kwargs, dynamic=dynamic, dialect=dialect)
    return exported


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    operators: Collection[str] = (),
) -> Exported:
    """The program that `exported.save(path)` wrote, with its state, on the device of its export or on `device`.

    Runs by torch's operators alone: those that compute on tensors, and `operators` ("mylib.scaled.default").
    ExportedFileError where the file is cut off, changed, or something else, or names another operator.
    """
    exported: Exported = _run.load(path, device=device, operators=operators)
    return exported
