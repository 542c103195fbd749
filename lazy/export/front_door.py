"""`torchlazy.export` and `torchlazy.load` as users call them; what implements them is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.record.tensor import LazyTensor

_export: Any = DeferredModule("torchlazy.lazy.export.export")
_load: Any = DeferredModule("torchlazy.lazy.export.load")


class ExportError(RuntimeError):
    """A program that is no one whole graph, or that torch's exported program has no form for.

    Cause: it reads a value on the host (`.item()`, `if tensor:`, a printed loss), has a shape that depends on data,
    writes to a tensor that is neither an argument nor module state, or takes another path at another size.
    Fix: the line that the message names; `torchlazy.compile` and the lazy device run such programs as they are.
    """


class ExportedFileError(RuntimeError):
    """A file that `torch.export.load` cannot read.

    Cause: another kind of file, one of an earlier torchlazy's own format, a download that broke off, a custom operator
    whose library is not imported.
    Fix: save the program again: `torch.export.save(torchlazy.export(model, args), path)`.
    """


def export(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
) -> torch.export.ExportedProgram:
    """One whole graph of `fn(*args, **kwargs)`, a function, method or module, with its state, sizes and guards, as
    torch's ExportedProgram.

    `dynamic` names dimensions that vary, by argument and axis: `{"x": {0: "batch", 1: "2*n"}}`, with names, linear
    forms of one name, or `torch.export.Dim`. The program is recorded at a few sizes and never run; how each number
    moves with the sizes is found from these recordings, and checked against each of them.

    `program.module()` is called as `fn` is, on tensors of the dtypes and devices of the examples; it checks sizes and
    constants. Its parameters are copies that need no gradient; those that `fn` writes to are buffers.
    `torch.export.save(program, path)` writes a file that `torch.export.load` reads without this package, and
    `torchlazy.load` with it.

    Raises ExportError where the program is no whole graph, with the user's line: it reads a value on the host, has a
    shape that depends on data, keeps a result in an attribute, or takes another path at another size; or where torch's
    exporter refuses it, in its words.
    """
    found: torch.export.ExportedProgram = _export.export(LazyTensor.recorder, fn, args, kwargs, dynamic=dynamic)
    return found


def load(path: str | os.PathLike[str], device: str | torch.device | None = None) -> Any:
    """The program in a file of `torch.export.save`, whoever exported it, as a module that is compiled by torchlazy
    (`torchlazy.compile(program.module())`), on the device of its export or on `device`.

    The file is read by `torch.export.load`, which may unpickle parts of it: load no file that you do not trust.
    ExportedFileError where torch cannot read it; ValueError for a device that there is none of.
    """
    return _load.load(path, device)
