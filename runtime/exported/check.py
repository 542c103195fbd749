"""Whether a graph that a file describes is one that an export makes, checked before anything of it is used.

Invariant: after `check_graph` every field has the type that its class declares, every name is given once and before it
is read, names that become Python source (in `graph_module`) are identifiers, and every operator is one that
`operators` lists or that the caller allows. ValueError says what is wrong.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torchlazy.runtime.exported.fx import callable_of
from torchlazy.runtime.exported.graph import ExportedGraph, InputSpec, Node, Ref, SizeSpec, StateSpec, TensorSpec
from torchlazy.runtime.exported.operators import OPERATORS
from torchlazy.runtime.exported.sizes import SizeExpr, names_in
from torchlazy.runtime.exported.tree import Tree

MOST_DIMENSIONS = 64
_TYPES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128
float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
"""
DTYPES = frozenset(getattr(torch, name) for name in _TYPES.split() if hasattr(torch, name))
_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia"})
_PARAMETERS = frozenset({"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD"})
_ARITY = {
    "add": 2, "sub": 2, "mul": 2, "floordiv": 2, "truediv": 2, "sqrt": 1, "rsqrt": 1, "float": 1
}  # fmt: skip
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device)
_OWN = frozenset(dir(torch.nn.Module()))  # no state of a module can be called so


def check_graph(graph: ExportedGraph, state: Mapping[str, torch.Tensor], more: Collection[str] = ()) -> None:
    """ValueError where the graph is none that an export makes; `more` are operators that it may name besides."""
    _tuples(graph)
    sizes = {size.name for size in graph.sizes}
    for given in graph.inputs:
        _want(_is_word(given.name) and type(given.place) is str, f"an input is called {given.name!r}")
        _spec(given.spec, sizes)
    for held in graph.state:
        _held(held, state)
    for size in graph.sizes:
        _size(size, graph)
    for seed in graph.seeds:
        _want(_is_word(seed), f"a seed is called {seed!r}")
    known = _once([*(i.name for i in graph.inputs), *(s.name for s in graph.state), *graph.seeds])
    targets = known - set(graph.seeds)
    _once([held.key for held in graph.state])
    _once([size.name for size in graph.sizes])
    allowed = frozenset(more)
    for node in graph.nodes:
        _node(node, graph.dialect, known, sizes, allowed)
    for name, spec in graph.outputs:
        _want(name in known, f"the result {name!r} is computed nowhere")
        _spec(spec, sizes)
    for target, name in graph.updates:
        _want(target in targets and name in known, f"{name!r} is no new value for {target!r}")
    _once([target for target, _ in graph.updates])
    _signature(graph)
    leaves = sum(_tree(child, frozenset()) for child in graph.arguments.children)
    _want(leaves == len(graph.inputs), "its arguments hold another number of tensors than it takes")
    _want(_tree(graph.results, sizes) == len(graph.outputs), "its results hold another number of tensors than it gives")
    _want(graph.default_dtype in DTYPES, f"{graph.default_dtype!r} is no default dtype")


def _want(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise[:300])


def _tuples(graph: ExportedGraph) -> None:
    """The outermost shape of each field."""
    _want(graph.dialect in ("aten", "prims"), f"no dialect {graph.dialect!r}")
    for name, kind in (("inputs", InputSpec), ("state", StateSpec), ("sizes", SizeSpec), ("nodes", Node)):
        items = getattr(graph, name)
        _want(type(items) is tuple and all(type(item) is kind for item in items), f"its {name} are none")
    for name in ("seeds", "keywords"):
        items = getattr(graph, name)
        _want(type(items) is tuple and all(type(item) is str for item in items), f"its {name} are none")
    for name in ("parameters", "updates", "notes", "outputs"):
        items = getattr(graph, name)
        _want(type(items) is tuple and all(type(item) is tuple and len(item) == 2 for item in items), f"its {name}")
        words = [part for item in items for part in (item[:1] if name == "outputs" else item)]
        _want(all(type(word) is str for word in words), f"its {name} are none")
    _want(type(graph.arguments) is Tree and type(graph.results) is Tree, "its arguments or results are no structure")


def _once(names: list[str]) -> set[str]:
    found = set(names)
    _want(len(found) == len(names), "a name is given twice")
    return found


def _is_word(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


# ---------------------------------------------------------------- tensors and sizes


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _number(value: Any, sizes: Collection[str], depth: int = 0) -> None:
    """An int, or an expression of known sizes."""
    if not isinstance(value, SizeExpr):
        return _want(_is_int(value), f"{value!r} is no size")
    _want(depth < 40 and type(value.args) is tuple, "a size is no expression")
    if value.op == "size":
        ok = len(value.args) == 1 and type(value.args[0]) is str and value.args[0] in sizes
        return _want(ok, f"there is no size {value.args!r}")
    _want(type(value.op) is str and _ARITY.get(value.op) == len(value.args), f"no operator {value.op!r} of sizes")
    for part in value.args:
        if type(part) is not float:
            _number(part, sizes, depth + 1)
    return None


def _spec(spec: Any, sizes: Collection[str]) -> None:
    _want(type(spec) is TensorSpec, "a tensor is not described")
    _want(type(spec.shape) is tuple and type(spec.strides) is tuple, "a tensor's shape is none")
    _want(len(spec.shape) == len(spec.strides) <= MOST_DIMENSIONS, "a tensor's strides do not fit its shape")
    for number in (*spec.shape, *spec.strides):
        _number(number, sizes)
        _want(isinstance(number, SizeExpr) or number >= 0, f"{number!r} is no size")
    _want(isinstance(spec.dtype, torch.dtype) and spec.dtype in DTYPES, f"no tensor is of {spec.dtype!r}")
    _want(_is_device(spec.device), f"no device {spec.device!r}")


def _is_device(name: Any) -> bool:
    if type(name) is not str:
        return False
    kind, _, number = name.partition(":")
    return kind in _DEVICES and (name == kind or (number.isascii() and number.isdigit() and len(number) < 4))


def _held(held: StateSpec, state: Mapping[str, torch.Tensor]) -> None:
    _want(_is_word(held.name) and held.kind in ("parameter", "buffer", "constant"), f"a state is called {held.name!r}")
    _want(type(held.key) is str and all(map(_is_part, held.key.split("."))), f"no state can be called {held.key!r}")
    _spec(held.spec, ())
    _want(held.key in state, f"the graph reads {held.key}, of which there is no value")
    value = state[held.key]
    same = tuple(value.shape) == held.spec.shape and value.dtype is held.spec.dtype
    _want(same, f"{held.key} is {value.dtype} of {list(value.shape)}, the graph wants {held.spec}")


def _is_part(part: str) -> bool:
    """One part of a dotted name; `graph_module` writes it into source text."""
    return bool(part) and part.isprintable() and not set(part) & set("\"'\\{}") and part not in _OWN


def _size(size: SizeSpec, graph: ExportedGraph) -> None:
    _want(_is_word(size.name), f"a size is called {size.name!r}")
    numbers = [size.low, size.step, size.rest, *([] if size.high is None else [size.high])]
    _want(all(map(_is_int, numbers)) and size.step > 0, f"the size {size.name} has no bounds")
    seen = type(size.seen) is tuple and len(size.seen) > 0 and all(map(_is_int, size.seen))
    _want(seen, f"the size {size.name} was never seen")
    told = any(_tells(n, size.name) for given in graph.inputs for n in given.spec.shape)
    _want(told, f"no argument tells the size {size.name}")


def _tells(expr: Any, name: str) -> bool:
    """Whether a dimension of this size gives the symbol: sums and products with constants."""
    if not isinstance(expr, SizeExpr) or names_in(expr) != {name}:
        return False
    if expr.op == "size":
        return True
    if expr.op not in ("add", "sub", "mul"):
        return False
    inner = [part for part in expr.args if isinstance(part, SizeExpr)]
    return len(inner) == 1 and _tells(inner[0], name)


# ---------------------------------------------------------------- calls


def _node(node: Node, dialect: str, known: set[str], sizes: Collection[str], more: Collection[str]) -> None:
    _want(type(node.op) is str and type(node.frame) is str and type(node.args) is tuple, "a call is none")
    schema = _checked_operator(node.op, dialect, more)
    pairs = type(node.kwargs) is tuple and all(type(pair) is tuple and len(pair) == 2 for pair in node.kwargs)
    _want(pairs and all(_is_word(name) for name, _ in node.kwargs), f"{node.op}: its keywords are none")
    if schema is not None:
        names = {argument.name for argument in schema.arguments}
        _want(len(node.args) <= len(names), f"{node.op} takes no {len(node.args)} arguments")
        _want(all(name in names for name, _ in node.kwargs), f"{node.op} takes no such keyword")
    for value in (*node.args, *(value for _, value in node.kwargs)):
        _argument(value, known, sizes)
    _want(type(node.specs) is tuple, f"{node.op}: its results are not described")
    names_of = list(_names(node.outputs))
    _want(len(names_of) == len(node.specs), f"{node.op}: its results are not described")
    for name, spec in zip(names_of, node.specs, strict=True):
        _want(_is_word(name) and name not in known, f"{node.op}: a result is called {name!r}")
        known.add(name)
        _want(type(spec) is tuple and len(spec) == 2 and type(spec[0]) is tuple, f"{node.op}: a result has no shape")
        _want(len(spec[0]) <= MOST_DIMENSIONS, f"{node.op}: a result has {len(spec[0])} dimensions")
        for number in spec[0]:
            _number(number, sizes)
        _want(isinstance(spec[1], torch.dtype) and spec[1] in DTYPES, f"{node.op}: no result is of {spec[1]!r}")
    if node.layout is not None:
        _spec(node.layout, sizes)
        _want(bool(node.args) and type(node.args[0]) is Ref, f"{node.op} has no operand to lay out")


def _checked_operator(op: str, dialect: str, more: Collection[str]) -> Any:
    """The schema of an operator that a file may name; None for a primitive."""
    if op.startswith("prims."):
        _want(dialect == "prims", f"{op} in the dialect {dialect}")
        callable_of(op)
        return None
    schema = callable_of(op)._schema  # refuses what writes to its arguments, whatever the caller allows
    _want(
        op in OPERATORS or op in more,
        f"it calls {op}, which no file may; if you trust the file and need it: load(path, operators=[{op!r}])",
    )
    return schema


def _argument(value: Any, known: Collection[str], sizes: Collection[str]) -> None:
    if type(value) is Ref:
        _want(type(value.name) is str and value.name in known, f"{value.name!r} is read before it is computed")
    elif isinstance(value, SizeExpr):
        _number(value, sizes)
    elif type(value) in (tuple, list):
        for item in value:
            _argument(item, known, sizes)
    else:
        _want(isinstance(value, _CONSTANTS), f"a {type(value).__name__} is no argument")
        _want(type(value) is not int or _is_int(value), "a number is too large")
        _want(not isinstance(value, torch.device) or _is_device(str(value)), f"no device {value}")


def _names(outputs: Any) -> Iterator[str]:
    if type(outputs) is tuple:
        for item in outputs:
            yield from _names(item)
    elif outputs is not None:
        yield outputs


# ---------------------------------------------------------------- the call


def _signature(graph: ExportedGraph) -> None:
    names = [name for name, _ in graph.parameters]
    _once(names)
    for name, kind in graph.parameters:
        ok = name.isidentifier() and not keyword.iskeyword(name) and kind in _PARAMETERS
        _want(ok, f"no parameter {name!r} of the kind {kind!r}")
    _want(graph.arguments.kind == "dict" and set(graph.arguments.keys) == set(names), "its arguments have other names")
    _want(all(name in names for name in graph.keywords), "its keywords are none of its arguments")


def _tree(tree: Any, sizes: Collection[str]) -> int:
    """How many tensors a structure holds."""
    _want(type(tree) is Tree and type(tree.children) is tuple and type(tree.keys) is tuple, "a structure is none")
    _want(type(tree.name) is str and (tree.value is None or tree.kind == "constant"), "a structure is none")
    if tree.kind in ("leaf", "constant"):
        _want(not tree.children and not tree.keys, f"a {tree.kind} that holds something")
        value = tree.value
        if isinstance(value, SizeExpr):
            _number(value, sizes)
        else:
            plain = isinstance(value, _CONSTANTS) and not isinstance(value, (complex, torch.layout))
            _want(plain, f"a {type(value).__name__} is no constant")
        return int(tree.kind == "leaf")
    if tree.kind in ("tuple", "list"):
        _want(not tree.keys, f"a {tree.kind} with keys")
    else:
        _want(tree.kind in ("dict", "namedtuple", "record"), f"no structure {tree.kind!r}")
        kinds = (str, int, bool) if tree.kind == "dict" else (str,)
        same = len(tree.keys) == len(tree.children) and all(type(key) in kinds for key in tree.keys)
        _want(same and len(set(tree.keys)) == len(tree.keys), f"a {tree.kind} with other keys than values")
    if tree.kind == "namedtuple":
        _want(_is_word(tree.name) and all(map(_is_word, tree.keys)), f"no named tuple {tree.name!r}")
    return sum(_tree(child, sizes) for child in tree.children)


__all__ = ["DTYPES", "MOST_DIMENSIONS", "check_graph"]
