"""Exported graphs as `torch.export`'s ExportedProgram: called as the exported function was, with its state by name.

torch's exporter traces a module (export/module.py) that takes the function's own arguments, once, with symbolic sizes:
what our recordings say about sizes becomes its constraints, and what no constraint can say an assertion in its graph.

Invariant: what was passed by position or by keyword is passed so again, in the same containers, and results come in the
containers that the function gave. Named tuples and records (data classes, a `ModelOutput`), whose classes are the
model's code, are tuples and dicts there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.traceback import preserve_node_meta
from torchlazy.lazy.export.expressions import OPERATORS, SizeExpr, evaluate
from torchlazy.lazy.export.front_door import ExportError
from torchlazy.lazy.export.graph import ExportedGraph, InputSpec, SizeSpec
from torchlazy.lazy.export.module import FRAME, GraphCalls, Parameter, in_order
from torchlazy.lazy.export.tree import Tree, unflatten_plain


def to_exported_program(graph: ExportedGraph, state: Mapping[str, torch.Tensor]) -> torch.export.ExportedProgram:
    """The program as torch's own, by `torch.export.export` with the same symbolic sizes.

    ExportError for a dtype or device among the arguments or results, and in torch's words where its exporter refuses
    the program.
    """
    parameters = _parameters(graph)
    _check_constants(graph.results, "the result")
    # Not at 1, which torch would take for fixed.
    sizes = {size.name: next((at for at in size.seen if at > 1), size.seen[0]) for size in graph.sizes}
    examples = iter([_example(given, sizes) for given in graph.inputs])
    args, kwargs = _as_passed(parameters, [unflatten_plain(p.tree, examples) for p in parameters])
    dims = {size.name: _dim(size) for size in graph.sizes}
    bounds = {size.name: (size.low, size.high) for size in graph.sizes}

    def traced(dim_of: Callable[[Any], Any], asserts_sizes: bool) -> torch.export.ExportedProgram:
        module = GraphCalls(graph, state, parameters, asserts_sizes)
        dynamic = _dynamic(parameters, graph.inputs, dim_of)
        with torch.no_grad(), preserve_node_meta():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
        _name_lines(program)
        return program

    try:
        return traced(lambda expr: _dim_of(expr, dims), False)
    except Exception as error:
        refused = error
    if dims:
        # Its own analysis asks for more than ours (no output of size 1, say): let it say what in its own constraints.
        try:
            return traced(lambda expr: _hint(expr, bounds), True)
        except Exception as error:
            refused = error
    text = " ".join(str(refused).split())[:400]
    raise ExportError(
        f"torchlazy.export: torch.export cannot take this program in ({type(refused).__name__}: {text})\n"
        "remedy: leave the sizes that vary out of `dynamic`, or keep what it names out of the exported function"
    ) from refused


def _name_lines(program: torch.export.ExportedProgram) -> None:
    """The user's line is each node's stack trace: the tracer saw only our module."""
    for node in program.graph.nodes:
        frame = node.meta.pop("custom", {}).get(FRAME, "")
        file, _, line = frame.rpartition(":")
        if line.isdigit():
            node.meta["stack_trace"] = f'  File "{file}", line {line}, in exported\n'
        else:
            node.meta.pop("stack_trace", None)


def _parameters(graph: ExportedGraph) -> list[Parameter]:
    """The arguments in the order of the graph's inputs. What went into a `**kwargs` is a parameter each."""
    found: list[Parameter] = []
    kinds = dict(graph.parameters)
    for key, tree in zip(graph.arguments.keys, graph.arguments.children, strict=True):
        name = str(key)
        _check_constants(tree, f"argument {name}")
        if kinds[name] == "VAR_KEYWORD":
            inner = zip(tree.keys, tree.children, strict=True)
            found += [Parameter(str(word), "KEYWORD_ONLY", child) for word, child in inner]
        else:
            found.append(Parameter(name, "KEYWORD_ONLY" if name in graph.keywords else kinds[name], tree))
    return found


def _check_constants(tree: Tree, place: str) -> None:
    if tree.kind == "constant" and isinstance(tree.value, (torch.dtype, torch.device)):
        raise ExportError(
            f"torchlazy.export: {place} is a {type(tree.value).__name__}, or has one in it, which torch's exported "
            "programs neither take nor give\nremedy: export a function that names it itself and returns tensors"
        )
    for child in tree.children:
        _check_constants(child, place)


def _example(given: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [evaluate(n, sizes) for n in given.spec.shape]
    strides = [evaluate(n, sizes) for n in given.spec.strides]
    return torch.empty_strided(shape, strides, dtype=given.spec.dtype, device=given.spec.device).zero_()


def _as_passed(parameters: Sequence[Parameter], values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by position and by keyword."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.kind == "VAR_POSITIONAL":
            args += value
        elif parameter.kind == "KEYWORD_ONLY":
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _dynamic(
    parameters: Sequence[Parameter], inputs: Sequence[InputSpec], dim_of: Callable[[Any], Any]
) -> dict[str, Any]:
    """What varies, as `torch.export` wants it told: containers like the arguments', a dict for each tensor."""
    specs = iter(inputs)

    def told(tree: Tree) -> Any:
        if tree.kind == "leaf":
            shape = next(specs).spec.shape
            return {axis: dim_of(size) for axis, size in enumerate(shape) if isinstance(size, SizeExpr)} or None
        if tree.kind == "constant":
            return None
        children = [told(child) for child in tree.children]
        if tree.kind in ("dict", "ordered"):
            pairs = zip(tree.keys, children, strict=True)
            return dict(pairs) if tree.kind == "dict" else OrderedDict(pairs)
        return children if tree.kind == "list" else tuple(children)

    found = {parameter.name: told(parameter.tree) for parameter in parameters}
    return {parameter.name: found[parameter.name] for parameter in in_order(parameters)}


def _dim(size: SizeSpec) -> Any:
    if size.step == 1:
        return torch.export.Dim(size.name, min=size.low, max=size.high)
    low = -(-(size.low - size.rest) // size.step)
    high = None if size.high is None else (size.high - size.rest) // size.step
    return size.step * torch.export.Dim(f"{size.name}_units", min=low, max=high) + size.rest


def _dim_of(expr: Any, dims: Mapping[str, Any]) -> Any:
    if not isinstance(expr, SizeExpr):
        return expr
    if expr.op == "size":
        return dims[expr.args[0]]
    a, b = (_dim_of(arg, dims) for arg in expr.args)
    return OPERATORS[expr.op](b, a) if isinstance(a, int) and expr.op in ("add", "mul") else OPERATORS[expr.op](a, b)


def _hint(expr: SizeExpr, bounds: Mapping[str, tuple[int, int | None]]) -> Any:
    if expr.op != "size":
        return torch.export.Dim.DYNAMIC
    low, high = bounds[expr.args[0]]
    return torch.export.Dim.DYNAMIC(min=low, max=high)


__all__ = ["to_exported_program"]
