"""The documents name what there is: files, modules, `torchlazy.*`, settings, variables, make targets, options, reasons.

Invariant: `claims` reads a text alone; what each claim must be true of is looked up in this checkout.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torchlazy
from torchlazy.lazy import config

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "benchmarks", "examples")
    for path in (ROOT / folder).glob("*.md")
)
FOLDERS = ("lazy", "autograd", "prims", "inductor", "runtime", "tests", "examples", "benchmarks", "docs")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_PATH = re.compile(rf"(?<![\w./~-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_NAME = re.compile(r"(?<![\w./-])torchlazy(?:\.\w+)+")
_VARIABLE = re.compile(r"\bTORCHLAZY_[A-Z_]*[A-Z]\b")
_TARGET = re.compile(r"(?:^|[\s`;])make ([a-z]+)\b")
_MODULE = re.compile(r"-m ((?:torchlazy|tests|benchmarks|examples)(?:\.\w+)+)")
_SCRIPT = re.compile(r"((?:benchmarks|examples)/\w+\.py|-m (?:tests|benchmarks|torchlazy)(?:\.\w+)+)([^\n`|#]*)")
_SETTING = re.compile(r"^\| `(\w+)` \| `TORCHLAZY_", re.MULTILINE)
_OPTION = re.compile(r"(?<=\s)--[a-z][\w-]*")


def claims(text: str) -> Iterator[tuple[str, str]]:
    """(what kind, what is named) of everything that a document names as being there."""
    yield from (("file", link) for link in _LINK.findall(text))
    yield from (("setting", name) for name in _SETTING.findall(text))
    for code in _CODE.findall(text):
        yield from (("file", path) for path in _PATH.findall(code))
        yield from (("variable", name) for name in _VARIABLE.findall(code))
        yield from (("module", name) for name in _MODULE.findall(code))
        yield from (("name", name) for name in _NAME.findall(_MODULE.sub("", code)))
        yield from (("target", name) for name in _TARGET.findall(code))
        for script, rest in _SCRIPT.findall(code):
            yield from (("option", f"{script} {option}") for option in _OPTION.findall(" " + rest))


@cache
def sources() -> str:
    """Every line that could read a variable."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if path != Path(__file__)] + [ROOT / "__init__.py", ROOT / "cache.py"]
    return "\n".join(path.read_text() for path in files)


def is_true(kind: str, what: str, document: str) -> bool:
    if kind == "file":
        places = (ROOT, (ROOT / document).parent)
        return any((place / name).exists() for place in places for name in (what, f"{what}.py"))
    if kind == "variable":
        return what in config._VARIABLES or what in sources()
    if kind == "setting":
        return hasattr(torchlazy.config, what)
    if kind == "module":
        return importlib.util.find_spec(what) is not None
    if kind == "target":
        return re.search(rf"^{what}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if kind == "option":
        script, option = what.rsplit(" ", 1)
        script = script.removeprefix("-m ").removeprefix("torchlazy.")
        path = ROOT / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
        path = path if path.exists() else path.with_suffix("") / "__main__.py"
        beside = path.parent.glob("*.py")  # scripts of one folder share what they read
        return path.exists() and any(f'"{option}"' in one.read_text() for one in beside)
    return has_name(what)


def has_name(name: str) -> bool:
    """Whether `torchlazy.a.b` is a module, or what a module or an object in it has."""
    found: object = torchlazy
    path = "torchlazy"
    if hasattr(torch.ops.torchlazy, name.split(".")[1]):
        return True
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif importlib.util.find_spec(path) is not None:
            found = importlib.import_module(path)
        else:
            return False
    return True


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_is_there(document: str) -> None:
    found = dict.fromkeys(claims((ROOT / document).read_text()))
    wrong = [f"{kind}: {what}" for kind, what in found if not is_true(kind, what, document)]
    assert not wrong, f"{document} names what is not there: {wrong}"


@pytest.mark.parametrize(
    "text",
    [
        "`lazy/no_such_file.py`", "[there](docs/nowhere.md)", "`TORCHLAZY_NO_SUCH_THING`", "`make coffee`",
        "`python -m torchlazy.prims.nowhere`", "`torchlazy.no_such_name(x)`", "`examples/train_gpt.py --no-option`",
        "| `no_such_setting` | `TORCHLAZY_RNG` | |",
    ],
)  # fmt: skip
def test_what_is_not_there_is_found(text: str) -> None:
    assert [what for kind, what in claims(text) if not is_true(kind, what, "README.md")]


_REASONS = ("refuse", "_note", "NotYet", "TooMuch", "UnfitSlots", "DoesNotFit")
_LETTERS = 14  # letters of a reason that must stand in the page


def _reasons() -> Iterator[str]:
    """The first long constant part of each reason that a compiled callable's report can print."""
    for path in sorted((ROOT / "lazy" / "compiled").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and call.args:
                name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                given = call.args[0]
                parts = given.values if isinstance(given, ast.JoinedStr) else [given]
                texts = [one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                if name in _REASONS and texts:
                    yield next((text for text in texts if len(text) > _LETTERS), max(texts, key=len)).strip(" :(),")


def test_each_reason_is_explained() -> None:
    page = (ROOT / "docs" / "inspect.md").read_text()
    missing = [reason for reason in dict.fromkeys(_reasons()) if reason[:_LETTERS] not in page]
    assert not missing, f"docs/inspect.md does not explain {missing}"
