"""Renames identifiers as a table says: `python tools/rename.py TABLE...` in a checkout, after `rooms.py`.

The names of this change are in `names.txt`. Lines: `top lazy/room/file.py Old New` (a name at the top of that file,
wherever it is imported), `attr old new` (a token, everywhere), and `at path.py:LINE` under `method file Class old new`
(that token on these lines).

Invariant: strings and comments change only where they name the identifier in backticks or patch it by name.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

from rooms import ROOT, File, global_uses

FOLDERS = ("lazy", "prims", "runtime", "autograd", "inductor", "tests", "benchmarks", "examples")


def python_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split() if name.split("/")[0] in FOLDERS or "/" not in name]


def module_of(file: str) -> str:
    return "torchlazy." + file.removesuffix(".py").replace("/", ".")


def rename_top(file: str, old: str, new: str, paths: list[Path]) -> None:
    module = module_of(file)
    package, _, stem = module.rpartition(".")
    quoted = re.compile(rf"`{re.escape(old)}(?=[`.(])")
    for path in paths:
        text = path.read_text()
        if old not in text:
            continue
        one = File(path.relative_to(ROOT).as_posix(), text)
        concerned = False
        if one.path == file:
            one.rename(old, new)
            for node in ast.walk(one.tree):
                if isinstance(node, ast.Constant) and node.value == old:  # in __all__
                    one.edits[one.span(node)] = f'"{new}"'
            concerned = True
        for node in ast.walk(one.tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = node.module or ""
            if node.level:
                parts = ("torchlazy", *Path(one.path).parent.parts)
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                if base == module and alias.name == old:
                    concerned = True
                    start, _ = one.span(alias)
                    one.edits[start, start + len(old)] = new
                    if alias.asname is None:
                        if node.col_offset:
                            print(f"{one.path}:{node.lineno}: imported inside a function: {old}")
                        one.rename(old, new)
                elif base == package and alias.name == stem:
                    called = alias.asname or stem
                    for attribute in one.module_attributes(called):
                        if attribute.attr == old:
                            concerned = True
                            end = one.span(attribute)[1]
                            one.edits[end - len(old), end] = new
                    for call in ast.walk(one.tree):
                        if (
                            isinstance(call, ast.Call)
                            and len(call.args) > 1
                            and isinstance(call.args[0], ast.Name)
                            and call.args[0].id == called
                            and isinstance(call.args[1], ast.Constant)
                            and call.args[1].value == old
                        ):
                            concerned = True
                            one.edits[one.span(call.args[1])] = f'"{new}"'
        done = one.done() if one.edits else text
        done = done.replace(f"{module}.{old}", f"{module}.{new}")
        if concerned:
            done = quoted.sub(f"`{new}", done)
            bare = [n for n, _ in global_uses(ast.parse(done)) if n.id == old]
            if bare and one.path == file:
                print(f"{one.path}:{bare[0].lineno}: {old} is still there")
        if done != text:
            path.write_text(done)


def rename_tokens(text: str, names: dict[str, str], lines: set[int] | None = None) -> str:
    """NAME tokens; with `lines`, only on these."""
    rows = text.splitlines(keepends=True)
    edits = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in names and (lines is None or token.start[0] in lines):
            edits.append((token.start, token.end, names[token.string]))
    for (row, start), (_, end), new in reversed(edits):
        line = rows[row - 1]
        rows[row - 1] = line[:start] + new + line[end:]
    return "".join(rows)


def main() -> None:
    tops: list[tuple[str, str, str]] = []
    attributes: dict[str, str] = {}
    places: dict[str, list[tuple[int, str, str]]] = {}
    method = ("", "")
    for table in sys.argv[1:]:
        for line in Path(table).read_text().splitlines():
            words = line.split("#")[0].split()
            if not words:
                continue
            if words[0] == "top":
                tops.append((words[1], words[2], words[3]))
            elif words[0] == "attr":
                attributes[words[1]] = words[2]
            elif words[0] == "method":
                method = words[3], words[4]
            elif words[0] == "at":
                file, _, number = words[1].partition(":")
                places.setdefault(file, []).append((int(number), *method))
            else:
                print("not understood:", line)
    for file, found in places.items():
        path = ROOT / file
        text = path.read_text()
        for number, old, new in found:
            done = rename_tokens(text, {old: new}, {number})
            if done == text:
                print(f"{file}:{number}: no {old}")
            text = done
        path.write_text(text)
    paths = python_files()
    for file, old, new in tops:
        if not re.search(rf"^(def|class|async def) {old}\b|^{old}\b", (ROOT / file).read_text(), re.MULTILINE):
            print(f"{file}: no {old}")
        rename_top(file, old, new, paths)
    for path in paths:
        text = path.read_text()
        done = rename_tokens(text, attributes)
        for old, new in attributes.items():
            done = re.sub(rf"`((?:\w+\.)*){old}(?=[`(])", rf"`\1{new}", done)
            done = re.sub(rf'(setattr\(\w+, )"{old}"', rf'\1"{new}"', done)
        if done != text:
            path.write_text(done)


if __name__ == "__main__":
    main()
