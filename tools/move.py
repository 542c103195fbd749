"""Moves files of other packages into folders, as `more_rooms.txt` says: `python tools/move.py` in a checkout.

Each line is `new/path: old/path`, both without `.py`. Imports, dotted names and paths are rewritten as `rooms.py` does.
"""

from __future__ import annotations

import ast
import re
import subprocess

from rooms import ROOT, File

TABLE: dict[str, str] = {}
for _line in (ROOT / "tools" / "more_rooms.txt").read_text().splitlines():
    _new, _, _old = _line.partition(": ")
    TABLE[_old] = _new
_WRITTEN = "torchlazy.@"


def dotted(path: str) -> str:
    return "torchlazy." + path.replace("/", ".")


MODULES = {dotted(old): dotted(new) for old, new in TABLE.items()}
_NAMES = sorted(MODULES, key=len, reverse=True)
_MODULE = re.compile(r"\b({})\b".format("|".join(map(re.escape, _NAMES))))
_PATH = re.compile(r"(?<![\w/.])((?:torchlazy/)?)({})\.py\b".format("|".join(sorted(TABLE, key=len, reverse=True))))


def rewrite_imports(file: File) -> None:
    taken = {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name)}
    taken |= {n.arg for n in ast.walk(file.tree) if isinstance(n, ast.arg)}
    taken |= {n.name for n in ast.walk(file.tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom):
            taken |= {a.asname or a.name for a in node.names}
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        indent = " " * node.col_offset
        tail = file.lines[node.end_lineno - 1].rstrip("\n")[node.end_col_offset :]
        tail = tail if "#" in tail else ""
        if node.module in MODULES:
            names = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in node.names)
            text = f"{indent}from {MODULES[node.module]} import {names}{tail}\n"
        elif any(f"{node.module}.{a.name}" in MODULES for a in node.names):
            rows = []
            for a in node.names:
                new = MODULES.get(f"{node.module}.{a.name}")
                if new is None:
                    rows.append(f"{indent}from {node.module} import {a.name}" + (f" as {a.asname}" if a.asname else ""))
                    continue
                package, _, stem = new.rpartition(".")
                called = a.asname or a.name
                if a.asname is None and stem != a.name:
                    called = stem if stem not in taken else f"{package.rpartition('.')[2]}_{stem}"
                    if node.col_offset:
                        print(f"{file.path}:{node.lineno}: imported inside a function: {a.name}")
                    if called != stem:
                        print(f"{file.path}: {a.name} is imported as {called}")
                    file.rename(a.name, called)
                rows.append(
                    f"{indent}from {package} import {stem}" + (f" as {called}" if called != stem else "") + tail
                )
            text = "\n".join(rows) + "\n"
        else:
            continue
        file.edits[file.whole_lines(node)] = text.replace("torchlazy.", _WRITTEN)


def rewrite_text(text: str) -> str:
    text = _MODULE.sub(lambda m: MODULES[m[1]], text)
    text = _PATH.sub(lambda m: f"{m[1]}{TABLE[m[2]]}.py", text)
    return text.replace(_WRITTEN, "torchlazy.")


def main() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if name.startswith("tools/") or not path.is_file():
            continue
        if path.suffix == ".py":
            text = path.read_text()
            file = File(name, text)
            rewrite_imports(file)
            done = rewrite_text(file.done())
        elif path.suffix in (".md", ".toml", ".h", ".cpp", ""):
            text = path.read_text()
            done = rewrite_text(text)
        else:
            continue
        if done != text:
            path.write_text(done)
    for old, new in TABLE.items():
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", f"{old}.py", f"{new}.moving"], cwd=ROOT, check=True)
    for new in TABLE.values():
        subprocess.run(["git", "mv", f"{new}.moving", f"{new}.py"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
