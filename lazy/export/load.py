"""`torchlazy.load(path)`: a program that `torch.export.save` wrote, run by our kernels.

Invariant: torch alone reads the file; what it trusts in one, this trusts (docs/export.md).
"""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torchlazy.lazy.compiled import front_door
from torchlazy.lazy.export.front_door import ExportedFileError


def load(path: str | os.PathLike[str], device: str | torch.device | None = None) -> Any:
    """See `torchlazy.load`."""
    try:
        path = os.fsdecode(path)
    except TypeError as error:
        raise TypeError(f"torchlazy.load: a {type(path).__name__} is no file; give its path") from error
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'torchlazy.load: device {device!r} is none; use "cpu", "cuda" or "cuda:0"') from error
    _check_file(path)
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise ExportedFileError(
            f"{path}: torch.export.load cannot read it ({type(error).__name__}: {str(error)[:300]})\n"
            "remedy: save the program again with torch.export.save; import the library of a custom operator first"
        ) from error
    if place is not None:
        program = move_to_device_pass(program, _moved(program, str(place)))
    return front_door.compile(program.module())


def _check_file(path: str) -> None:
    """An error with a remedy where the file is none of torch.export's."""
    with open(path, "rb"):
        pass  # its own errors: no such file, a folder
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except zipfile.BadZipFile:
        raise ExportedFileError(
            f"{path} is no exported program, or is cut off\nremedy: save or fetch it again"
        ) from None
    if {"manifest.json", "graph.json"} <= names:
        raise ExportedFileError(
            f"{path} has the format of an earlier torchlazy, which is not read any more\n"
            "remedy: export the model anew: torch.export.save(torchlazy.export(model, args), path)"
        )


def _moved(program: torch.export.ExportedProgram, place: str) -> dict[str, str]:
    """Where each device of the program goes: an accelerator, or else the CPU, to `place`."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    nodes = [(node.meta.get("val"), node.kwargs.get("device")) for node in program.graph.nodes]
    used = {str(t.device) for t in [*tensors, *(v for v, _ in nodes)] if isinstance(t, torch.Tensor)}
    used |= {str(d) for _, d in nodes if d is not None}
    moving = used - {"cpu"} or {"cpu"}
    return {device: place for device in moving}


__all__ = ["load"]
