"""`python -m tests.files_page`: every product file with its purpose, room by room, as a page.

Invariant: pure reading; a purpose is the first paragraph of a file's docstring or of its leading comment.
"""

from __future__ import annotations

import ast
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lazy", "autograd", "inductor", "runtime", "prims")  # in the order of the page


def product_files(*endings: str) -> list[Path]:
    """Every file that a wheel contains: those of Python, or those with the endings asked for."""
    files = [ROOT / "__init__.py"] if "py" in (endings or ("py",)) else []
    for package in PACKAGES:
        for ending in endings or ("py",):
            files += sorted((ROOT / package).rglob(f"*.{ending}"))
    return files


def purpose(path: Path) -> str:
    """The first paragraph of a file's docstring, or of its leading comment."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source)) or ""
    else:
        comment = takewhile(lambda line: line.startswith("//"), source.splitlines())
        text = "\n".join(line.removeprefix("//").strip() for line in comment)
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    """The page: a section for each folder, a row for each file."""
    lines = ["# Files", "", "Made of the files' docstrings."]
    folders: dict[Path, list[Path]] = {}
    for path in product_files("py", "h", "cpp"):
        folders.setdefault(path.parent, []).append(path)
    for folder, files in folders.items():
        init = folder / "__init__.py"
        lines += ["", f"## {'The root' if folder == ROOT else folder.relative_to(ROOT).as_posix() + '/'}", ""]
        if folder != ROOT and init.exists() and init.stat().st_size:
            lines += [purpose(init), ""]
        lines += ["| file | purpose |", "|---|---|"]
        for path in files:
            if path.stat().st_size and (path.name != "__init__.py" or folder == ROOT):
                lines.append(f"| `{path.relative_to(ROOT).as_posix()}` | {purpose(path)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
