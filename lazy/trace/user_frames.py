"""The user's line: the innermost Python frame that belongs neither to torch nor to torchlazy."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep
LAZY_FOLDER = _OURS + "lazy" + os.sep  # prefix of the names of torchlazy's own Python files
_OUR_PACKAGES = tuple(_OURS + name + os.sep for name in ("lazy", "autograd", "prims", "inductor", "runtime"))
_WITHOUT_FILES = ("<frozen", "<torchlazy")  # the interpreter's own modules, and generated code
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_INTERNAL: dict[str, bool] = {}
_SHORT: dict[tuple[str, str], str] = {}  # by file and working folder: a path takes 20 times the time of a look-up


def _is_internal(filename: str) -> bool:
    found = _INTERNAL.get(filename)
    if found is None:
        path = os.path.abspath(filename)
        found = path.startswith(_TORCH) or path.startswith(_OUR_PACKAGES) or filename.startswith(_WITHOUT_FILES)
        found = found or filename.endswith("contextlib.py") or path == _OURS + "__init__.py"
        _INTERNAL[filename] = found
    return found


def user_frame() -> str:
    """ "path/model.py:41" of the caller's own code, or "" at the interpreter's exit."""
    return text_of(user_place())


def text_of(place: tuple[str, int] | None) -> str:
    """A place as text."""
    return "" if place is None else f"{_short(place[0])}:{place[1]}"


def user_place() -> tuple[str, int] | None:
    """The file and line of the caller's own code; None at the interpreter's exit."""
    frame = sys._getframe(1)
    known = _INTERNAL  # a capture asks at each operator, a dozen frames deep
    before = ""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename is not before:
            before = filename
            if not (known[filename] if filename in known else _is_internal(filename)):
                return filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def frame_of_error(error: BaseException) -> str:
    """The user's innermost line in an exception's traceback, or ""."""
    found = ""
    place = error.__traceback__
    while place is not None:
        filename = place.tb_frame.f_code.co_filename
        if not _is_internal(filename):
            found = f"{_short(filename)}:{place.tb_lineno}"
        place = place.tb_next
    return found


def line_in(trace: str) -> str:
    """The user's innermost line in the text of a traceback, or ""."""
    found = [(name, line) for name, line in _PLACE.findall(trace) if not _is_internal(name)]
    return f"{_short(found[-1][0])}:{found[-1][1]}" if found else ""


def _short(filename: str) -> str:
    """The path from the working folder, where the file is below it."""
    try:
        place = filename, os.getcwd()
    except OSError:  # the folder was removed
        return filename
    found = _SHORT.get(place)
    if found is None:
        relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
        found = _SHORT[place] = filename if relative.startswith("..") else relative
    return found
