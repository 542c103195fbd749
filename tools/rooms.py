"""Moves lazy/'s flat files into rooms, merging small ones, as `rooms.txt` says: `python tools/rooms.py` in a checkout.

Each line of the table is `room/file: old names`. Imports in every Python file, dotted names and paths in strings,
comments and documents are rewritten; names that files to be merged both have are renamed by `RENAMED`.

Invariant: but for the place of a definition nothing of what is executed changes; what cannot be rewritten is printed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# (old file, name) -> new name, where two files that become one have the name
RENAMED: dict[tuple[str, str], str] = {}
ALIASES: dict[str, str] = {}  # old module -> what it is called where it is imported as a module without an alias

for _line in (
    (ROOT / "tools" / "renamed.txt").read_text().splitlines() if (ROOT / "tools" / "renamed.txt").exists() else []
):
    if _line.strip() and not _line.startswith("#"):
        _old, _new = _line.split()
        RENAMED[tuple(_old.split("."))] = _new  # type: ignore[index]


def table() -> dict[str, str]:
    """Old file -> new one, both without `.py`, relative to lazy/."""
    found = {}
    for line in (ROOT / "tools" / "rooms.txt").read_text().splitlines():
        new, _, olds = line.partition(": ")
        found.update(dict.fromkeys(olds.split(), new))
    return found


TABLE = table()
GROUPS: dict[str, list[str]] = defaultdict(list)
for _old, _new in TABLE.items():
    GROUPS[_new].append(_old)


def dotted(new: str) -> str:
    return "torchlazy.lazy." + new.replace("/", ".")


# ------------------------------------------------------------------ scopes


def bound_in(scope: ast.AST) -> set[str]:
    """Names that a function or lambda binds itself."""
    found: set[str] = set()
    outer: set[str] = set()
    arguments = scope.args  # type: ignore[attr-defined]
    for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if a is not None:
            found.add(a.arg)

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(child.name)
                continue
            if isinstance(child, ast.Lambda):
                continue
            if isinstance(child, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                for inner in ast.walk(child):
                    if isinstance(inner, ast.NamedExpr):
                        found.add(inner.target.id)
                continue
            if isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
                found.add(child.id)
            elif isinstance(child, (ast.Global, ast.Nonlocal)):
                outer.update(child.names)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                found.update((a.asname or a.name).split(".")[0] for a in child.names)
            elif isinstance(child, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and child.name:
                found.add(child.name)
            visit(child)

    body = scope.body if isinstance(scope.body, list) else [scope.body]  # type: ignore[attr-defined]
    for statement in body:
        visit(ast.Module([statement], []) if isinstance(statement, ast.stmt) else ast.Expr(statement))
    return found - outer


def global_uses(tree: ast.Module) -> Iterator[tuple[ast.Name, frozenset[str]]]:
    """Each name, with the names that the functions around it bind."""

    def visit(node: ast.AST, local: frozenset[str]) -> Iterator[tuple[ast.Name, frozenset[str]]]:
        if isinstance(node, ast.Name):
            yield node, local
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = local | bound_in(node)
            arguments = node.args
            outside: list[ast.AST] = [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
            if not isinstance(node, ast.Lambda):
                outside += node.decorator_list
                outside += [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg) and a.annotation]
                outside += [node.returns] if node.returns else []
            for part in outside:
                yield from visit(part, local)
            for part in node.body if isinstance(node.body, list) else [node.body]:
                yield from visit(part, inner)
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            names = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
            yield from visit(node.generators[0].iter, local)
            inner = local | names
            for place, g in enumerate(node.generators):
                if place:
                    yield from visit(g.iter, inner)
                yield from visit(g.target, inner)
                for test in g.ifs:
                    yield from visit(test, inner)
            for part in ("elt", "key", "value"):
                if hasattr(node, part):
                    yield from visit(getattr(node, part), inner)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, local)

    yield from visit(tree, frozenset())


# ------------------------------------------------------------------ one file


class File:
    """A Python file under rewriting: edits of spans of its text."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.edits: dict[tuple[int, int], str] = {}  # byte offsets in utf-8
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.encode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def whole_lines(self, node: ast.AST) -> tuple[int, int]:
        return self.starts[node.lineno - 1], self.starts[node.end_lineno]  # type: ignore[attr-defined]

    def rename(self, old: str, new: str) -> None:
        """The module's own name `old` is `new` from now on, wherever it is read or written."""
        for node, local in global_uses(self.tree):
            if node.id == old and old not in local:
                if new in local:
                    print(f"{self.path}:{node.lineno}: {old} -> {new} is hidden by a local name")
                self.edits[self.span(node)] = new
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == old and node in self.tree.body:
                line = self.lines[node.lineno - 1]
                at = line.index(old, node.col_offset)
                start = self.starts[node.lineno - 1] + len(line[:at].encode())
                self.edits[start, start + len(old)] = new
            if isinstance(node, ast.Global) and old in node.names:
                start, end = self.span(node)
                self.edits[start, end] = "global " + ", ".join(new if n == old else n for n in node.names)

    def module_attributes(self, alias: str, *, bare: bool = False) -> Iterator[ast.Attribute]:
        for node, local in list(global_uses(self.tree)):
            if node.id == alias and alias not in local:
                parent = self._parents().get(id(node))
                if isinstance(parent, ast.Attribute):
                    if bare and parent.attr in local:
                        print(f"{self.path}:{node.lineno}: {parent.attr} is hidden by a local name")
                    yield parent
                else:
                    yield ast.Attribute(node, "", ast.Load())

    def _parents(self) -> dict[int, ast.AST]:
        if not hasattr(self, "_known"):
            self._known = {id(c): n for n in ast.walk(self.tree) for c in ast.iter_child_nodes(n)}
        return self._known

    def done(self) -> str:
        data = self.text.encode()
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            data = data[:start] + new.encode() + data[end:]
        return data.decode()


def rewrite_imports(file: File, own: str | None) -> None:
    """Imports of flat files name the rooms. `own`: the new file that this becomes a part of, if of lazy/."""
    top = {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name)}
    top |= {a.arg for a in ast.walk(file.tree) if isinstance(a, ast.arg)}
    top |= {n.name for n in ast.walk(file.tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom):
            top |= {a.asname or a.name for a in node.names}
    given: dict[str, str] = {}
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        indent = " " * node.col_offset
        out: list[str] = []
        tail = file.lines[node.end_lineno - 1].rstrip("\n")[node.end_col_offset :]
        if tail.strip() and "#" in tail:
            print(f"{file.path}:{node.lineno}: comment of an import: {tail}")
        if node.module == "torchlazy.lazy":
            for a in node.names:
                if a.name not in TABLE:
                    out.append(f"{indent}from torchlazy.lazy import {a.name}" + (f" as {a.asname}" if a.asname else ""))
                    continue
                new = TABLE[a.name]
                room, _, stem = new.rpartition("/")
                old = a.asname or a.name
                if new == own:
                    for attribute in file.module_attributes(old, bare=True):
                        name = RENAMED.get((a.name, attribute.attr), attribute.attr)
                        if not attribute.attr:
                            print(f"{file.path}: module {old} of the same file is used as a value")
                            continue
                        file.edits[file.span(attribute)] = name
                    continue
                for attribute in file.module_attributes(old):
                    if (a.name, attribute.attr) in RENAMED:
                        _start, end = file.span(attribute)
                        value_end = file.span(attribute.value)[1]
                        file.edits[value_end, end] = "." + RENAMED[a.name, attribute.attr]
                package = "torchlazy.lazy" + ("." + room.replace("/", ".") if room else "")
                if a.asname:
                    alias = a.asname
                elif given.get(stem) == new or stem == a.name or (stem not in top and stem not in given):
                    alias = stem
                else:
                    alias = f"{stem}_module" if stem == room.rpartition("/")[2] else f"{room.rpartition('/')[2]}_{stem}"
                    print(f"{file.path}: {a.name} is imported as {alias}")
                given[alias] = new
                if alias != old:
                    file.rename(old, alias)
                text = f"{indent}from {package} import {stem}" + (f" as {alias}" if alias != stem else "")
                text += tail if "#" in tail else ""
                if text not in out:
                    out.append(text)
        elif node.module.startswith("torchlazy.lazy."):
            module = node.module.split(".", 2)[2]
            if module not in TABLE:
                continue
            new = TABLE[module]
            names = []
            for a in node.names:
                name = RENAMED.get((module, a.name), a.name)
                if new == own:
                    if a.asname and a.asname != name:
                        file.rename(a.asname, name)
                    elif not a.asname and name != a.name:
                        file.rename(a.name, name)
                    continue
                if name != a.name and not a.asname:
                    file.rename(a.name, name)
                names.append(name + (f" as {a.asname}" if a.asname and a.asname != name else ""))
            if names:
                out.append(f"{indent}from {dotted(new)} import {', '.join(names)}{tail if '#' in tail else ''}")
        else:
            continue
        if not out and node.col_offset:
            parent = file._parents()[id(node)]
            if getattr(parent, "body", []) == [node]:
                out = [f"{indent}pass"]
        text = "".join(line + "\n" for line in out)
        file.edits[file.whole_lines(node)] = text.replace("torchlazy.lazy", _WRITTEN)


_WRITTEN = "torchlazy.@lazy"  # an import that is rewritten already
_OLD = "|".join(sorted(TABLE, key=len, reverse=True))
_MODULE = re.compile(rf"\btorchlazy\.lazy\.({_OLD})\b")
_PATH = re.compile(rf"(?<![\w/.])((?:torchlazy/)?)lazy/({_OLD})\.py\b")


def rewrite_text(text: str) -> str:
    """Paths and dotted names of flat files, in strings, comments and prose."""
    return _rewrite_text(text).replace(_WRITTEN, "torchlazy.lazy")


def _rewrite_text(text: str) -> str:
    text = _MODULE.sub(lambda m: dotted(TABLE[m[1]]), text)
    return _PATH.sub(lambda m: f"{m[1]}lazy/{TABLE[m[2]]}.py", text)


# ------------------------------------------------------------------ merging


def is_typing(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def own_names(tree: ast.Module) -> dict[str, str]:
    """Names that a module binds at its top: to what is imported, or to itself."""
    found: dict[str, str] = {}

    def note(node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom):
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            found.update(
                {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
            )
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = "self"
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for n in ast.walk(target):
                    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                        found[n.id] = "self"
        elif isinstance(node, (ast.If, ast.For, ast.Try, ast.With)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    note(child)

    for node in tree.body:
        note(node)
    found.pop("__all__", None)
    return found


def ordered(group: list[str], sources: dict[str, str]) -> list[str]:
    """What others of the group import comes first."""
    needs = {}
    for old in group:
        tree = ast.parse(sources[old])
        found = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "torchlazy.lazy":
                found |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchlazy.lazy."):
                found.add(node.module.split(".")[2])
        needs[old] = found & set(group)
    done: list[str] = []
    while len(done) < len(group):
        ready = [old for old in group if old not in done and needs[old] <= set(done)]
        done.append(ready[0])
    return done


def statement(source: str, name: str) -> str | None:
    """The assignment of a constant at the top of a file, as it is written."""
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.get_source_segment(source, node)
    return None


def collisions(group: list[str], sources: dict[str, str]) -> list[str]:
    found = []
    seen: dict[str, tuple[str, str]] = {}
    for old in group:
        for name, origin in own_names(ast.parse(sources[old])).items():
            name = RENAMED.get((old, name), name) if origin == "self" else name
            if origin.startswith("torchlazy.lazy."):
                parts = origin.split(".")
                if parts[2] in group and len(parts) == 4:
                    continue  # from a file of the group: becomes its name there
                if parts[2] in group and len(parts) == 3:
                    continue
            where = origin if origin != "self" else f"self of {old}"
            if (
                name in seen
                and origin == "self"
                and statement(sources[old], name) == statement(sources[seen[name][1]], name)
            ):
                continue  # the same, word for word: it stands once
            if name in seen and seen[name][0] != where:
                found.append(f"{TABLE[old]}: {name} is {where} in {old}, {seen[name][0]} in {seen[name][1]}")
            seen.setdefault(name, (where, old))
    return found


def merged(new: str, sources: dict[str, str]) -> str:
    group = ordered(GROUPS[new], sources)
    docs, imports, typing, bodies, names = [], [], [], [], []
    constants: set[str] = set()
    for old in group:
        file = File(f"lazy/{old}.py", sources[old])
        for (module, name), to in RENAMED.items():
            if module == old:
                file.rename(name, to)
        rewrite_imports(file, new)
        text = rewrite_text(file.done())
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        drop: list[tuple[int, int]] = []
        for node in tree.body:
            piece = "".join(lines[node.lineno - 1 : node.end_lineno])
            if node is tree.body[0] and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docs.append(ast.literal_eval(node.value))
            elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
                pass
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append(piece)
            elif is_typing(node):
                inner = lines[node.body[0].lineno - 1 : node.body[-1].end_lineno]
                typing += [line for line in inner if line.strip() != "pass"]
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "__all__"
            ):
                renamed = {name: to for (module, name), to in RENAMED.items() if module == old}
                names += [renamed.get(n, n) for n in ast.literal_eval(node.value)]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and piece in constants:
                pass
            else:
                if isinstance(node, (ast.Assign, ast.AnnAssign)):
                    constants.add(piece)
                continue
            drop.append((node.lineno - 1, node.end_lineno))
        for start, end in reversed(drop):
            del lines[start:end]
        bodies.append("".join(lines).strip("\n"))
    if len(docs) == 1:
        doc = docs[0]
    else:
        heads = [" ".join(d.split("\n\n")[0].split()) for d in docs]
        rest = [p for d in docs for p in d.strip().split("\n\n")[1:]]
        plain = [p for p in rest if not p.startswith("Invariant")]
        invariants = [p for p in rest if p.startswith("Invariant")]
        doc = "\n\n".join([heads[0], *heads[1:], *plain, *invariants]).strip() + "\n"
    quote = '"""' + doc + '"""\n\n'
    parts = [quote, "from __future__ import annotations\n\n", *imports]
    if typing:
        parts += ["\nif TYPE_CHECKING:\n", *dict.fromkeys(typing)]
    text = "".join(parts) + "\n\n" + "\n\n\n".join(b for b in bodies if b) + "\n"
    if names:
        text += "\n\n__all__ = [" + ", ".join(f'"{n}"' for n in sorted(dict.fromkeys(names))) + "]\n"
    return text


def main() -> None:
    lazy = ROOT / "lazy"
    sources = {old: (lazy / f"{old}.py").read_text() for old in TABLE}
    clashes = [text for new, group in GROUPS.items() if len(group) > 1 for text in collisions(group, sources)]
    print("\n".join(clashes))
    if clashes or "--check" in sys.argv:
        return
    made = {}
    for new, group in GROUPS.items():
        if len(group) == 1:
            (old,) = group
            file = File(f"lazy/{old}.py", sources[old])
            for (module, name), to in RENAMED.items():
                if module == old:
                    file.rename(name, to)
            rewrite_imports(file, new)
            made[new] = rewrite_text(file.done())
        else:
            made[new] = merged(new, sources)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        path = ROOT / name
        if name.startswith("tools/") or name == "ARCHITECTURE.md":
            continue
        if name.startswith("lazy/") and name.endswith(".py") and name != "lazy/__init__.py":
            continue
        if path.suffix == ".py":
            text = path.read_text()
            if "lazy" in text:
                file = File(name, text)
                rewrite_imports(file, None)
                done = rewrite_text(file.done())
                if done != text:
                    path.write_text(done)
        elif path.suffix in (".md", ".toml", ".h", "") and path.is_file():
            text = path.read_text()
            done = rewrite_text(text)
            if done != text:
                path.write_text(done)
    for new, group in GROUPS.items():
        (lazy / f"{new}.py").parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", f"lazy/{group[0]}.py", f"lazy/{new}.py.moving"], cwd=ROOT, check=True)
    for group in GROUPS.values():
        for old in group[1:]:
            subprocess.run(["git", "rm", "-q", f"lazy/{old}.py"], cwd=ROOT, check=True)
    for new, text in made.items():
        subprocess.run(["git", "mv", f"lazy/{new}.py.moving", f"lazy/{new}.py"], cwd=ROOT, check=True)
        (lazy / f"{new}.py").write_text(text)


if __name__ == "__main__":
    main()
