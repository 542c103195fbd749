"""The architecture as a test: who imports whom, what is never imported, names of files and classes, the rooms of lazy/.

Invariant: `breaches` is a pure function of a file's path and source, so each rule is shown here to fire on a breach.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.files_page import ROOT, product_files, purpose
from tests.files_page import page as files_page

RANK = {"prims": 0, "runtime": 1, "autograd": 2, "inductor": 2, "lazy": 3}
OPTIONAL_TOOLCHAINS = {"triton", "numba", "llvmlite"}
FORBIDDEN_TORCH = {"_inductor", "_dynamo", "_functorch", "_lazy", "_prims", "_refs", "_decomp"}
# The rooms of lazy/, from below: a file imports from its own room and from those before it. A part ("plan/layers")
# and the room it stands in are one.
ROOMS = (
    "config", "deferred", "torch_private", "trace", "report", "shapes", "numbers", "record", "ops", "plan", "run",
    "native", "device", "joint", "compiled/template", "compiled/guards", "compiled/capture", "compiled/sizes",
    "compiled/replay", "compiled", "distributed", "export", "dynamo", "inspect", "inspect/flops", "api",
)  # fmt: skip
PARTS = {"plan/layers": "plan", "run/segments": "run"}
# Type annotations that point upward. None may be added.
KNOWN_UPWARD = {
    ("record/recorder.py", "torchlazy.lazy.compiled.capture.session"),
}
MOST_FILES = 20  # of a room
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "tools"}


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


def room_of(name: str) -> str:
    """The room of a file or module of lazy/: "plan/layers/check" -> "plan"; a file of lazy/ itself is its own."""
    folder, _, stem = name.rpartition("/")
    return PARTS.get(folder, folder) or stem


def room_breach(path: PurePosixPath, module: str) -> str:
    """What is wrong with a file of lazy/ importing a module of lazy/; empty if nothing is."""
    parts = module.split(".")
    if path.parts[0] != "lazy" or path.name == "__init__.py" or parts[:2] != ["torchlazy", "lazy"] or len(parts) < 3:
        return ""
    name = "/".join(parts[2:])
    if not (ROOT / "lazy" / f"{name}.py").exists():
        return ""  # `from torchlazy.lazy.trace import geometry` is judged as torchlazy.lazy.trace.geometry
    own = path.relative_to("lazy").with_suffix("").as_posix()
    if ROOMS.index(room_of(name)) <= ROOMS.index(room_of(own)):
        return ""
    if (f"{own}.py", module) in KNOWN_UPWARD:
        return ""
    return f"room {room_of(own)} imports {module}, which lies above it"


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
            found += [(node.lineno, text) for module in modules if (text := room_breach(path, module))]
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
        ("prims/decomps/a.py", "import torchlazy.runtime.program.program", "prims imports torchlazy.runtime"),
        ("runtime/a.py", "import torchlazy.lazy.trace.trace as t", "runtime imports torchlazy.lazy"),
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
        ("lazy/trace/a.py", "from torchlazy.lazy.record.recorder import Recorder", "lies above it"),
        ("lazy/record/a.py", "from torchlazy.lazy.run import driver", "lies above it"),
        ("lazy/compiled/guards/a.py", "from torchlazy.lazy.compiled.replay.replay import Replay", "lies above it"),
        ("lazy/compiled/replay/a.py", "import torchlazy.lazy.compiled.callable", "lies above it"),
        ("lazy/inspect/a.py", "from torchlazy.lazy.api import recorder", "lies above it"),
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
        ("inductor/a.py", "from torchlazy.runtime.program.program import Program\nfrom torchlazy.prims import ops"),
        ("inductor/codegen/a.py", "from torchlazy.inductor.ir import Kernel\nfrom . import kernel\nfrom .. import ir"),
        ("runtime/a.py", "def f():\n    import triton\n    from numba import njit"),
        ("prims/a.py", "import torch\nfrom torch._ops import OpOverload\nx = torch._C._nn"),
        ("prims/a.py", "import torch._prims_common"),
        ("__init__.py", "from torchlazy.lazy.api import sync"),
        ("lazy/record/a.py", "from torchlazy.lazy.record.paths import Path"),
        ("lazy/plan/layers/a.py", "from torchlazy.lazy.plan.pipeline import Planner"),
        ("lazy/compiled/a.py", "from torchlazy.lazy.compiled.replay.replay import Replay"),
        ("lazy/api.py", "from torchlazy.lazy.config import config"),
    ],
)
def test_what_is_allowed_is_no_breach(path, source):
    assert breaches(PurePosixPath(path), DOC + source) == []


def test_every_room_is_ranked_says_what_it_is_for_and_is_small():
    lazy = ROOT / "lazy"
    for folder in sorted({path.parent for path in lazy.rglob("*.py")} - {lazy}):
        room = folder.relative_to(lazy).as_posix()
        assert room in ROOMS or room in PARTS, f"lazy/{room} has no rank in ROOMS"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), (
            f"lazy/{room}/__init__.py says nothing"
        )
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, f"lazy/{room} has {len(files)} files"
    flat = {path.stem for path in lazy.glob("*.py")} - {"__init__"}
    assert flat <= set(ROOMS), f"files that belong into a room: {sorted(flat - set(ROOMS))}"


def test_known_upward_imports_are_still_there():
    for file, module in KNOWN_UPWARD:
        assert f"from {module} import" in (ROOT / "lazy" / file).read_text(), f"strike {file} from KNOWN_UPWARD"


def runtime_imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports as it is imported itself; not those for annotations alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in typing:
            yield from imported_modules(node, PurePosixPath(path.relative_to(ROOT).as_posix()))


def test_no_file_imports_itself_by_way_of_others():
    files = {".".join(("torchlazy", *path.relative_to(ROOT).with_suffix("").parts)): path for path in product_files()}
    needs = {name: [module for module in runtime_imports(path) if module in files] for name, path in files.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle of imports: {' -> '.join((*way[way.index(name) :], name))}"
        if name not in done:
            for module in needs[name]:
                visit(module, (*way, name))
            done.add(name)

    for name in needs:
        visit(name, ())


def test_a_class_name_stands_for_one_class():
    found: dict[str, list[str]] = {}
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert not twice, f"class names that stand for several classes: {twice}"


def test_every_file_says_its_purpose_and_stands_in_the_page_of_files():
    rows = set(files_page().splitlines())
    for path in product_files("py", "h", "cpp"):
        assert purpose(path) or not path.stat().st_size, f"{path} does not say what it is for"
        if path.stat().st_size and path.name != "__init__.py":
            assert f"| `{path.relative_to(ROOT).as_posix()}` | {purpose(path)} |" in rows
