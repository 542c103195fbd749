"""The architecture as a test: who imports whom, what is never imported, how files are named, ARCHITECTURE.md's lists.

Invariant: `breaches` is a pure function of a file's path and source, so each rule is shown here to fire on a breach.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
RANK = {"prims": 0, "runtime": 1, "autograd": 2, "inductor": 2, "lazy": 3}
OPTIONAL_TOOLCHAINS = {"triton", "numba", "llvmlite"}
FORBIDDEN_TORCH = {"_inductor", "_dynamo", "_functorch", "_lazy", "_prims", "_refs", "_decomp"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "tools"}


def product_files() -> list[Path]:
    """Every Python file that a wheel contains."""
    files = [ROOT / "__init__.py"]
    for package in RANK:
        files += sorted((ROOT / package).rglob("*.py"))
    return files


def package_of(path: PurePosixPath) -> str:
    """ "prims/decomps/nn.py" -> "prims"; the root's own files have no package."""
    return path.parts[0] if len(path.parts) > 1 else ""


def imported_modules(node: ast.Import | ast.ImportFrom, path: PurePosixPath) -> list[str]:
    """Full names of what a statement may import; `from a import b` counts as a and as a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    if node.level:
        folder = ("torchlazy", *path.parent.parts)
        module = ".".join([*folder[: len(folder) - node.level + 1], *([module] if module else [])])
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


def local_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, (ast.Import, ast.ImportFrom)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def is_forbidden(module: str) -> bool:
    """Whether a dotted name lies in one of the systems that this project implements anew."""
    parts = module.split(".")
    return len(parts) > 1 and parts[0] == "torch" and parts[1] in FORBIDDEN_TORCH


def layer_breach(importer: str, module: str) -> str:
    """What is wrong with `importer` (a package of ours, "" for the root) importing `module`; empty if nothing is."""
    parts = module.split(".")
    if parts[0] != "torchlazy" or not importer:
        return ""
    if len(parts) == 1:
        return ""  # `from torchlazy import x` is judged as torchlazy.x; `import torchlazy` below
    imported = parts[1]
    if imported not in RANK:
        return f"{importer} imports {module}, which only the root package offers"
    if imported != importer and RANK[imported] >= RANK[importer]:
        return f"{importer} imports {module}, which does not lie below it"
    return ""


def breaches(path: PurePosixPath, source: str) -> list[str]:
    """Every broken rule in one product file, as "path:line: what"."""
    tree = ast.parse(source)
    found: list[tuple[int, str]] = []
    importer = package_of(path)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = imported_modules(node, path)
            layered = next((text for text in (layer_breach(importer, module) for module in modules) if text), "")
            if layered:
                found.append((node.lineno, layered))
            if isinstance(node, ast.Import) and "torchlazy" in modules and importer:
                found.append((node.lineno, f"{importer} imports the root package"))
            found += [(node.lineno, f"imports {module}") for module in modules[:1] if is_forbidden(module)]
            if isinstance(node, ast.ImportFrom) and not is_forbidden(modules[0]):
                found += [(node.lineno, f"imports {module}") for module in modules[1:] if is_forbidden(module)]
        elif isinstance(node, ast.Attribute) and is_forbidden(dotted(node)) and dotted(node).count(".") == 1:
            found.append((node.lineno, f"uses {dotted(node)}"))
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found += [(node.lineno, f"imports {name}") for name in names if is_forbidden(name)]
    for local in local_imports(tree):
        module = imported_modules(local, path)[0]
        if module.split(".")[0] not in OPTIONAL_TOOLCHAINS:
            found.append((local.lineno, f"imports {module} inside a function"))
    if path.stem.strip("_").lower() in VAGUE_NAMES:
        found.append((1, "the file's name does not say what it holds"))
    if tree.body and ast.get_docstring(tree) is None:
        found.append((1, "no module docstring"))
    return [f"{path}:{line}: {text}" for line, text in sorted(dict.fromkeys(found))]


def test_product_files_keep_the_rules():
    found = []
    for path in product_files():
        found += breaches(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


DOC = '"""What and why."""\n'


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("prims/a.py", "from torchlazy.inductor import ir", "prims imports torchlazy.inductor"),
        ("prims/a.py", "from torchlazy import inductor", "prims imports torchlazy.inductor"),
        ("prims/decomps/a.py", "from ...inductor import ir", "prims imports torchlazy.inductor"),
        ("prims/decomps/a.py", "import torchlazy.runtime.program", "prims imports torchlazy.runtime"),
        ("runtime/a.py", "import torchlazy.lazy.trace as t", "runtime imports torchlazy.lazy"),
        ("runtime/a.py", "from torchlazy.autograd.joint import x", "runtime imports torchlazy.autograd"),
        ("inductor/a.py", "from torchlazy.autograd import joint", "inductor imports torchlazy.autograd"),
        ("autograd/a.py", "from torchlazy.inductor import ir", "autograd imports torchlazy.inductor"),
        ("lazy/a.py", "import torchlazy", "lazy imports the root package"),
        ("lazy/a.py", "from torchlazy import metrics", "only the root package offers"),
        ("lazy/a.py", "def f():\n    from torchlazy.prims import ops", "inside a function"),
        ("lazy/a.py", "class A:\n    def f(self):\n        import json", "imports json inside a function"),
        ("lazy/a.py", "import torch._dynamo", "imports torch._dynamo"),
        ("lazy/a.py", "from torch._inductor.ir import x", "imports torch._inductor.ir"),
        ("lazy/a.py", "from torch import _functorch", "imports torch._functorch"),
        ("lazy/a.py", "import torch\nx = torch._decomp.table()", "uses torch._decomp"),
        ("lazy/a.py", "import importlib\nimportlib.import_module('torch._lazy.ts_backend')", "torch._lazy.ts_backend"),
        ("lazy/a.py", "if True:\n    import torch._refs as r", "imports torch._refs"),
        ("lazy/utils.py", "x = 1", "name does not say"),
        ("inductor/_common.py", "x = 1", "name does not say"),
    ],
)
def test_each_rule_fires_on_a_breach(path, source, expected):
    found = breaches(PurePosixPath(path), DOC + source)
    assert len(found) == 1, found
    assert expected in found[0]
    assert found[0].startswith(f"{path}:")


def test_a_file_without_docstring_is_a_breach_and_an_empty_file_is_none():
    assert breaches(PurePosixPath("lazy/a.py"), "x = 1") == ["lazy/a.py:1: no module docstring"]
    assert breaches(PurePosixPath("lazy/__init__.py"), "") == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lazy/a.py", "from torchlazy.inductor import ir\nfrom torchlazy.autograd import joint"),
        ("inductor/a.py", "from torchlazy.runtime.program import Program\nfrom torchlazy.prims import ops"),
        ("inductor/codegen/a.py", "from torchlazy.inductor.ir import Kernel\nfrom . import kernel\nfrom .. import ir"),
        ("runtime/a.py", "def f():\n    import triton\n    from numba import njit"),
        ("prims/a.py", "import torch\nfrom torch._ops import OpOverload\nx = torch._C._nn"),
        ("prims/a.py", "import torch._prims_common"),
        ("__init__.py", "from torchlazy.lazy.api import sync"),
    ],
)
def test_what_is_allowed_is_no_breach(path, source):
    assert breaches(PurePosixPath(path), DOC + source) == []


def purpose(path: Path) -> str:
    """The first paragraph of a file's docstring, or of its leading comment."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source)) or ""
    else:
        text = source.split("\n//\n")[0].replace("//", "")
    return " ".join(text.split("\n\n")[0].split())


def test_architecture_page_names_every_file_and_only_files_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w./{},-]+\.(?:py|h))` \|", text, flags=re.MULTILINE)
    files = product_files() + [path for package in RANK for path in sorted((ROOT / package).rglob("*.h"))]
    product = {path.relative_to(ROOT).as_posix() for path in files if path.stat().st_size}
    missing = [f"| `{name}` | {purpose(ROOT / name)} |" for name in sorted(product - set(rows))]
    assert len(rows) == len(set(rows)), "a file stands twice in ARCHITECTURE.md"
    assert not missing, "lines to add to ARCHITECTURE.md:\n" + "\n".join(missing)
    assert not set(rows) - product, "files that ARCHITECTURE.md names and that do not exist"
